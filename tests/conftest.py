"""Small models and texts for the tests. Everything is built or shipped here; nothing is downloaded."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from evenround.blocks import Block, Group, Weights, on_devices
from evenround.chains import HOST, Chain, Home
from evenround.config import TuneConfig
from evenround.data import tiny_llama
from evenround.memory.place import Label, Layout, Placement, no_label
from evenround.states import SiteState, start_values
from evenround.tune import float_outputs, initial_states

torch.set_num_threads(1)  # test processes share the cores

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ARCHITECTURES: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "llama_tied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SMALL),
    "mistral_sliding": transformers.MistralConfig(**SMALL, sliding_window=8),
    "gemma2": transformers.Gemma2Config(
        **SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **SMALL, sliding_window=8, layer_types=["sliding_attention", "sliding_attention", "full_attention"]
    ),
    "phi": transformers.PhiConfig(**{key: value for key, value in SMALL.items() if key != "head_dim"}),
    "gpt2": transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
    "opt": transformers.OPTConfig(
        vocab_size=128, hidden_size=64, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64,
        word_embed_proj_dim=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
    "bloom": transformers.BloomConfig(vocab_size=128, hidden_size=64, n_layer=3, n_head=4, pad_token_id=0, bos_token_id=1, eos_token_id=2),
}  # fmt: skip


def save_model(
    config: transformers.PretrainedConfig, folder: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB", seed: int = 0
) -> transformers.PreTrainedModel:
    """A random model of `config`, saved to `folder` and returned."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases away from their trivial initial values
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" not in name:
                parameter.mul_(3)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


@contextlib.contextmanager
def group_of(
    blocks: Sequence[Block],
    micro_batch: int,
    devices: Sequence[torch.device] = (HOST,),
    places: Mapping[str, int] | None = None,
    label: Label = no_label,
) -> Iterator[Group]:
    """The blocks as a group on the first of `devices`, but modules in `places` (name → number) on others; chains are on the host."""
    layout = Layout(strategy="single", replicas=({"": 0, **(places or {})},), owners={}, micro_batch=micro_batch, chains="host")
    with on_devices(blocks, Placement(layout, devices, label)) as group:
        yield group


def host_chain(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Chain:
    """A chain in host memory, values undefined."""
    return Chain.empty(shape, dtype, [Home(HOST, shape[0])])


def chain_of(values: Tensor) -> Chain:
    """A chain that holds the tensor itself."""
    return Chain((values,))


def values_of(chain: Chain | None) -> Tensor:
    """All samples of a chain, a tensor of its own."""
    assert chain is not None
    return torch.cat(list(chain.on_host()))


def run_all(blocks: Sequence[Block], hidden: Tensor, batch: int, weights: Weights | None = None) -> Tensor:
    """What the blocks give for all samples, `batch` at a time: the float blocks, or those with `weights` in place of their own."""
    with group_of(blocks, batch) as group, torch.no_grad():
        if weights is None:
            out = host_chain(hidden.shape, hidden.dtype)
            float_outputs(group, chain_of(hidden), out, TuneConfig())
            return values_of(out)
        parts = [range(start, min(start + batch, len(hidden))) for start in range(0, len(hidden), batch)]
        return torch.cat([group.forward(hidden[part.start : part.stop], part, 0, weights) for part in parts])


def plain_states(group: Group, config: TuneConfig | None = None) -> list[SiteState]:
    """The tuning state of every site, from the range of its weights."""
    config = config or TuneConfig()
    return initial_states(group, start_values(group, config, {}), config)


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The shipped trained model."""
    return tiny_llama()


@pytest.fixture(params=sorted(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param
