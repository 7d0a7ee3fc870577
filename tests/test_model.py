"""The skeleton, its sites, materialization, and blocks called one by one as the whole model calls them."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from conftest import ARCHITECTURES, SMALL, host_chain, run_all, save_model, values_of
from evenround.blocks import Block
from evenround.calls import embed, outside_blocks, to_head_inputs
from evenround.chains import Chain
from evenround.checkpoint import Checkpoint
from evenround.errors import UserError
from evenround.model import Skeleton, skeleton_from


def open_skeleton(folder: Path) -> Skeleton:
    return skeleton_from(folder, Checkpoint.open(folder))


def logits_block_by_block(skeleton: Skeleton, tokens: torch.Tensor, mask: torch.Tensor | None, batch: int) -> torch.Tensor:
    embedded = embed(skeleton, tokens, mask, torch.float32, host_chain)
    hidden = values_of(embedded.hidden)
    assert embedded.width == hidden.shape[-1]
    for number, name in enumerate(skeleton.block_names):
        with skeleton.materialized([name], torch.float32):
            hidden = run_all([Block(name, skeleton.block(number), embedded.calls[number], ())], hidden, batch)
    given = Chain((hidden[:2].clone(), hidden[2:].clone()))
    width = skeleton.sites[-1].shape[1]
    same = width == given.shape[-1]
    entering = given if same else Chain(tuple(torch.empty(*part.shape[:-1], width) for part in given.parts))
    to_head_inputs(skeleton, tokens, mask, given, entering, torch.float32)
    head = skeleton.sites[-1].name
    with skeleton.materialized([head], torch.float32), torch.no_grad():
        return skeleton.model.get_submodule(head)(values_of(entering))


@pytest.mark.parametrize("padded", [False, True])
def test_blocks_one_by_one_give_the_whole_models_logits(architecture: str, padded: bool, tmp_path: Path) -> None:
    model = save_model(ARCHITECTURES[architecture], tmp_path)
    torch.manual_seed(1)
    tokens = torch.randint(3, 128, (5, 24))
    mask = torch.ones(5, 24, dtype=torch.bool)
    if padded:
        mask[1, 20:] = False
        mask[3, 11:] = False
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).logits
    if architecture == "gemma2" and model.config.final_logit_softcapping:
        expected = torch.atanh(expected / model.config.final_logit_softcapping) * model.config.final_logit_softcapping
    found = logits_block_by_block(open_skeleton(tmp_path), tokens, mask if padded else None, batch=2)
    torch.testing.assert_close(found[mask], expected[mask], atol=2e-4, rtol=1e-3)


def test_the_skeleton_holds_no_weights_and_is_left_as_it_was(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path)
    skeleton = open_skeleton(tmp_path)
    assert all(parameter.device.type == "meta" for parameter in skeleton.model.parameters())
    forwards = [dict(module.__dict__).get("forward") for module in skeleton.model.modules()]
    with skeleton.materialized(["model.layers.1"], torch.float32):
        inside = {parameter.device.type for parameter in skeleton.block(1).parameters()}
        outside = {parameter.device.type for parameter in skeleton.block(0).parameters()}
    assert (inside, outside) == ({"cpu"}, {"meta"})
    assert all(parameter.device.type == "meta" for parameter in skeleton.model.parameters())
    embed(skeleton, torch.randint(3, 128, (3, 8)), None, torch.float32, host_chain)
    assert all(parameter.device.type == "meta" for parameter in skeleton.model.parameters())
    assert [dict(module.__dict__).get("forward") for module in skeleton.model.modules()] == forwards


def test_an_exception_inside_restores_the_skeleton(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path)
    skeleton = open_skeleton(tmp_path)
    with pytest.raises(RuntimeError, match="inside"), skeleton.materialized(["model.layers.0"], torch.float32):
        raise RuntimeError("inside")
    assert all(parameter.device.type == "meta" for parameter in skeleton.model.parameters())


def test_sites_are_linear_weights_in_block_order_then_the_head(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path, torch.bfloat16)
    sites = open_skeleton(tmp_path).sites
    assert len(sites) == 3 * 7 + 1
    assert [site.block for site in sites] == [0] * 7 + [1] * 7 + [2] * 7 + [None]
    down = next(site for site in sites if site.name == "model.layers.1.mlp.down_proj")
    assert (down.shape, down.checkpoint_name, down.dtype) == ((64, 96), "model.layers.1.mlp.down_proj.weight", torch.bfloat16)
    assert sites[-1].is_head and sites[-1].name == "lm_head"


def test_gpt2_sites_are_seen_as_out_in(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["gpt2"], tmp_path)
    sites = {site.name: site for site in open_skeleton(tmp_path).sites}
    fused = sites["transformer.h.0.attn.c_attn"]
    assert fused.transposed and fused.shape == (192, 64) and fused.has_bias


def test_a_prefix_that_the_file_lacks_is_found(tmp_path: Path) -> None:
    model = save_model(ARCHITECTURES["gpt2"], tmp_path)
    import safetensors.torch

    state = {name.removeprefix("transformer."): value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    skeleton = open_skeleton(tmp_path)
    assert skeleton.names["transformer.h.0.attn.c_attn.weight"] == "h.0.attn.c_attn.weight"
    assert skeleton.sites[-1].checkpoint_name == "wte.weight"


def test_a_tied_head_reads_the_embedding(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama_tied"], tmp_path)
    skeleton = open_skeleton(tmp_path)
    assert skeleton.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert skeleton.sites[-1].checkpoint_name == "model.embed_tokens.weight"


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    import safetensors.torch

    save_model(ARCHITECTURES["llama"], tmp_path)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    state["model.mtp.extra.weight"] = torch.ones(3)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    assert open_skeleton(tmp_path).unknown_tensors == ("model.mtp.extra.weight",)


def broken(tmp_path: Path, change: object) -> Skeleton:
    import safetensors.torch

    save_model(ARCHITECTURES["llama"], tmp_path)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    change(state)  # type: ignore[operator]
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    return open_skeleton(tmp_path)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tensor for model\.layers\.1\.mlp\.up_proj\.weight; it is incomplete"):
        broken(tmp_path, lambda state: state.pop("model.layers.1.mlp.up_proj.weight"))


def test_a_missing_norm_is_named_when_it_is_needed(tmp_path: Path) -> None:
    skeleton = broken(tmp_path, lambda state: state.pop("model.layers.1.input_layernorm.weight"))
    with (
        pytest.raises(UserError, match=r"no tensor for model\.layers\.1\.input_layernorm\.weight"),
        skeleton.materialized(["model.layers.1"], torch.float32),
    ):
        pass


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    skeleton = broken(tmp_path, lambda state: state.update({"model.layers.0.mlp.up_proj.weight": torch.ones(95, 64)}))
    with (
        pytest.raises(UserError, match=r"has shape \[95, 64\], but config.json makes .* \[96, 64\]"),
        skeleton.materialized(["model.layers.0"], torch.float32),
    ):
        pass


def test_a_nan_is_named(tmp_path: Path) -> None:
    skeleton = broken(tmp_path, lambda state: state["model.layers.0.mlp.up_proj.weight"].__setitem__((3, 5), float("nan")))
    with (
        pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.up_proj\.weight holds 1 NaN or infinite value"),
        skeleton.materialized(["model.layers.0"], torch.float32),
    ):
        pass
    assert all(parameter.device.type == "meta" for parameter in skeleton.model.parameters())


def test_no_config(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="has no config.json"):
        open_skeleton(tmp_path)


def test_an_unknown_architecture(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    with pytest.raises(UserError, match="cannot be used"):
        open_skeleton(tmp_path)


def test_a_model_that_is_no_causal_lm(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path)
    transformers.T5Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="only causal language models"):
        open_skeleton(tmp_path)


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="quantized already .*gptq"):
        open_skeleton(tmp_path)


def test_fused_experts_are_refused(tmp_path: Path) -> None:
    save_model(transformers.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32), tmp_path)
    with pytest.raises(UserError, match="mixture-of-experts"):
        open_skeleton(tmp_path)


# ----------------------------------------------------------------------------------------- architectures that want more than hidden states

GEMMA4 = {**SMALL, "sliding_window": 8, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16, "global_head_dim": 16}
IN_TURN = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def gemma4(**changes: object) -> transformers.PretrainedConfig:
    if "gemma4_text" not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers knows no Gemma 4")
    return transformers.CONFIG_MAPPING["gemma4_text"](**{**GEMMA4, "num_kv_shared_layers": 0, "num_hidden_layers": 4, **changes})


@pytest.mark.parametrize("padded", [False, True])
def test_arguments_that_depend_on_the_tokens_are_each_samples_own(padded: bool, tmp_path: Path) -> None:
    """Gemma 4 gives every layer an embedding of the tokens, with a mask or without."""
    model = save_model(gemma4(layer_types=IN_TURN), tmp_path)
    tokens = torch.randint(3, 128, (11, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(11, 24, dtype=torch.bool)
    mask[9, 13 if padded else 24 :] = False
    with torch.no_grad():
        expected = model.model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).last_hidden_state @ model.lm_head.weight.t()
    found = logits_block_by_block(open_skeleton(tmp_path), tokens, mask if padded else None, batch=4)
    torch.testing.assert_close(found[mask], expected[mask], atol=2e-4, rtol=1e-3)


def test_keys_shared_between_layers_are_refused(tmp_path: Path) -> None:
    save_model(gemma4(layer_types=IN_TURN, num_kv_shared_layers=2), tmp_path)
    with pytest.raises(UserError, match="layers of this model use what earlier layers leave in a KVSharingDict .* not supported yet"):
        embed(open_skeleton(tmp_path), torch.randint(3, 128, (4, 16)), None, torch.float32)  # before any block is tuned


def test_buffers_of_the_module_that_holds_the_blocks_do_not_draw_the_blocks_in(tmp_path: Path) -> None:
    """GPT BigCode's causal mask belongs to the module above the blocks."""
    save_model(transformers.GPTBigCodeConfig(vocab_size=128, n_embd=64, n_layer=3, n_head=4, n_positions=64), tmp_path)
    skeleton = open_skeleton(tmp_path)
    assert "transformer.bias" in outside_blocks(skeleton) and "transformer" not in outside_blocks(skeleton)
    with skeleton.materialized(outside_blocks(skeleton), torch.float32):
        assert {parameter.device.type for parameter in skeleton.block(0).parameters()} == {"meta"}
        assert skeleton.model.get_submodule("transformer.wte").weight.device.type == "cpu"


def test_computed_buffers_go_where_the_weights_go(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path)
    skeleton = open_skeleton(tmp_path)
    rotary = skeleton.model.get_submodule("model.rotary_emb")
    with skeleton.materialized(outside_blocks(skeleton), torch.float32, lambda name: torch.device("meta")):
        assert rotary.inv_freq.device.type == "meta"
    assert rotary.inv_freq.device.type == "cpu"


@pytest.mark.parametrize("name", ["opt-350m", "bert"])
def test_what_enters_the_head_is_what_the_model_gives_it(name: str, tmp_path: Path) -> None:
    """OPT-350m projects to a narrower embedding before its head, BERT has a layer there."""
    size = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    config = {
        "opt-350m": transformers.OPTConfig(**size, ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False, pad_token_id=0),
        "bert": transformers.BertConfig(**size, intermediate_size=96, is_decoder=True),
    }[name]
    model = save_model(config, tmp_path)
    tokens = torch.randint(3, 128, (3, 16))
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(logits_block_by_block(open_skeleton(tmp_path), tokens, None, batch=2), expected, atol=2e-4, rtol=1e-3)


def test_short_convolutions_stay_as_they_are(tmp_path: Path) -> None:
    config = transformers.Lfm2Config(**{**SMALL, "layer_types": ["conv", "full_attention", "conv"]})
    model = save_model(config, tmp_path)
    skeleton, tokens = open_skeleton(tmp_path), torch.randint(3, 128, (3, 16))
    assert not any(site.name.endswith("conv.conv") for site in skeleton.sites)
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(logits_block_by_block(skeleton, tokens, None, batch=2), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "abc"), ("hidden_size", -4), ("num_attention_heads", 0), ("vocab_size", 10**13), ("quantization_config", "abc"),
        ("hidden_act", "nope"), ("rope_parameters", [1, 2]), ("model_type", ["x"]), ("intermediate_size", None), ("layer_types", ["a"]),
        ("pad_token_id", 99999), ("num_hidden_layers", 0),
    ],
)  # fmt: skip
def test_a_config_that_makes_no_sense_is_a_clear_error(key: str, value: object, tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(UserError, match="config.json|no list of decoder blocks") as caught:
        open_skeleton(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
