"""Tensors without values take the bytes of tensors with them: the same program run both ways, and again, from remembered recipes."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from evenround.memory import shapes
from evenround.memory.simulate import SimulatedDevices

GIB = 2**30
Trace = list[tuple[tuple[int, ...], tuple[int, ...]] | list[tuple[int, ...]]]
"""Bytes in use and peak on each device, after each step of a program; at last the shapes of what it gave."""


def traced(program: Callable[[Callable[[], None]], object], values: bool) -> Trace:
    """What `program`, which calls its argument where it wants to be watched, takes."""
    trace: Trace = []
    with SimulatedDevices([GIB, GIB], values=values) as devices:

        def look() -> None:
            trace.append((devices.used, devices.peak))
            devices.reset_peak()

        result = program(look)
        look()
        shapes_given = [tuple(leaf.shape) for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        del result
        look()
    return [*trace, shapes_given]


def assert_alike(program: Callable[[Callable[[], None]], object]) -> Trace:
    """Twice without values: asked and remembered."""
    real = traced(program, True)
    assert traced(program, False) == real, "asked"
    assert traced(program, False) == real, "remembered"
    return real


def made(*size: int, dtype: torch.dtype = torch.float32, device: str = "cpu:0", grad: bool = False) -> Tensor:
    if not dtype.is_floating_point:
        return torch.zeros(*size, dtype=dtype, device=device)
    return torch.rand(*size, dtype=dtype, device=device).requires_grad_(grad)


# Name → operation; all that it gives is alive when the bytes are read. Kernels of the CPU that return part of a larger storage
# (`mse_loss` with a reduction) are not here: no operation on shapes can know.
ZOO: Mapping[str, Callable[[Tensor, Tensor], Any]] = {
    "sum of two": lambda a, b: a + b,
    "broadcast": lambda a, b: a[:, :1] * b,
    "scalar": lambda a, b: 2 * a - 1.5,
    "promotion": lambda a, b: a.to(torch.bfloat16) + b,
    "same dtype": lambda a, b: a.to(torch.float32),
    "matmul": lambda a, b: a @ b.t(),
    "batched": lambda a, b: torch.bmm(a.expand(3, -1, -1), b.t().expand(3, -1, -1)),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "linear": lambda a, b: F.linear(a, b, b[:, 0]),
    "addmm": lambda a, b: torch.addmm(b[:, 0], a, b.t()),
    "outer": lambda a, b: torch.outer(a[0], b[0]),
    "view": lambda a, b: a.view(-1),
    "views of views": lambda a, b: a.view(-1)[5:].view(-1, 5)[1:, ::2].t(),
    "transposed copy": lambda a, b: a.t().contiguous(),
    "contiguous already": lambda a, b: a.contiguous(),
    "reshape that copies": lambda a, b: a.t().reshape(-1),
    "reshape that does not": lambda a, b: a.reshape(2, -1),
    "expand": lambda a, b: a.unsqueeze(0).expand(5, -1, -1),
    "expand and clone": lambda a, b: a.unsqueeze(0).expand(5, -1, -1).clone(),
    "clone of a part": lambda a, b: a[1:3, ::2].clone(),
    "clone keeps strides": lambda a, b: a.t().clone(),
    "like": lambda a, b: (torch.zeros_like(a), torch.empty_like(a.t()), torch.ones_like(a, dtype=torch.int8)),
    "new": lambda a, b: (a.new_zeros(3), a.new_empty(2, 2), a.new_full((4,), 1.0)),
    "cat": lambda a, b: torch.cat([a, b, a]),
    "stack": lambda a, b: torch.stack([a, b], 1),
    "split": lambda a, b: a.split(2),
    "chunk": lambda a, b: a.chunk(3, dim=1),
    "unbind": lambda a, b: a.unbind(0),
    "split and clone": lambda a, b: [part.clone() for part in a.split(2)],
    "repeat": lambda a, b: a.repeat(2, 3),
    "repeat_interleave": lambda a, b: a.repeat_interleave(3, dim=0),
    "index": lambda a, b: a[torch.tensor([0, 2, 2])],
    "index on the device": lambda a, b: a[torch.zeros(4, dtype=torch.long, device=a.device)],
    "index_select": lambda a, b: a.index_select(0, torch.zeros(3, dtype=torch.long, device=a.device)),
    "gather": lambda a, b: a.gather(0, torch.zeros(2, 3, dtype=torch.long, device=a.device)),
    "where": lambda a, b: torch.where(a > b, a, b),
    "masked_fill": lambda a, b: a.masked_fill(b > 0.5, 0.0),
    "compare": lambda a, b: (a > b, a == b),
    "reductions": lambda a, b: (a.sum(), a.mean(-1), a.amax(0, keepdim=True), a.std(), a.square().sum(1)),
    "max and where": lambda a, b: a.max(dim=1),
    "topk": lambda a, b: a.topk(2),
    "sort": lambda a, b: a.sort(),
    "argmax": lambda a, b: a.argmax(-1),
    "cumsum": lambda a, b: a.cumsum(0),
    "norm": lambda a, b: torch.linalg.vector_norm(a, ord=1),
    "softmax": lambda a, b: (a.softmax(-1), F.log_softmax(a, -1), F.softmax(a.bfloat16(), dim=-1, dtype=torch.float32)),
    "activations": lambda a, b: (F.silu(a), F.gelu(a), F.gelu(a, approximate="tanh"), F.relu(a), torch.sigmoid(a), torch.tanh(a)),
    "layer_norm": lambda a, b: F.layer_norm(a, a.shape[-1:], b[0], b[0]),
    "rms_norm": lambda a, b: F.rms_norm(a, a.shape[-1:], b[0]),
    "embedding": lambda a, b: F.embedding(torch.zeros(3, 4, dtype=torch.long, device=a.device), a),
    "one_hot-like": lambda a, b: torch.zeros(3, 9, device=a.device).scatter_(1, torch.zeros(3, 1, dtype=torch.long, device=a.device), 1.0),
    "triangles": lambda a, b: (a.tril(), a.triu(1)),
    "pad": lambda a, b: F.pad(a, (1, 2)),
    "roll and flip": lambda a, b: (a.roll(1, 0), a.flip(1)),
    "arange": lambda a, b: torch.arange(9, device=a.device),
    "full": lambda a, b: (torch.full((2, 3), 1.0, device=a.device), torch.ones(4, device=a.device), torch.eye(3, device=a.device)),
    "bits": lambda a, b: (a.to(torch.uint8) & 3, a.to(torch.int32) << 2),
    "view of another dtype": lambda a, b: a.view(torch.int32),
    "in place": lambda a, b: a.add_(b).mul_(2).clamp_(0, 1),
    "in place on a view": lambda a, b: a[1:].sub_(b[1:], alpha=0.1),
    "assignment": lambda a, b: a.__setitem__(slice(0, 2), b[2:4]),
    "copy_": lambda a, b: a.copy_(b.bfloat16()),
    "fill and zero": lambda a, b: (a.zero_(), b.fill_(1)),
    "index_put": lambda a, b: a.index_put_((torch.tensor([0, 1]),), b[:2]),
    "out": lambda a, b: torch.add(a, b, out=a.new_empty(a.shape)),
    "out that grows": lambda a, b: torch.mm(a, b.t(), out=a.new_empty(0)),
    "resize_": lambda a, b: a.new_empty(2).resize_(7, 3),
    "transpose_": lambda a, b: a.clone().t_(),
    "unsqueeze_": lambda a, b: a.clone().unsqueeze_(0),
    "squeeze_": lambda a, b: a[:1].clone().squeeze_(0),
    "detach": lambda a, b: (a.detach(), a.data),
    "foreach": lambda a, b: torch._foreach_add([a, b], 1.0),
    "to the host": lambda a, b: a.cpu(),
    "to another device": lambda a, b: a.to("cpu:1"),
    "to another device and dtype": lambda a, b: a.to("cpu:1", torch.float16),
    "copy across": lambda a, b: made(6, 10, device="cpu:1").copy_(a),
    "from the host": lambda a, b: torch.ones(3, 3).to(a.device),
    "rotary": lambda a, b: a * b + torch.cat([-a[..., 5:], a[..., :5]], -1) * b,
    "complex": lambda a, b: torch.view_as_complex(a.view(6, 5, 2)) * 2,
    "random": lambda a, b: (torch.randn_like(a), torch.rand(3, device=a.device), a.bernoulli(0.5)),
    "dropout": lambda a, b: F.dropout(a, 0.5, training=True),
    "cross_entropy": lambda a, b: F.cross_entropy(a, torch.zeros(6, dtype=torch.long, device=a.device)),
    "loss": lambda a, b: ((a.float() - b.float()) * torch.ones(6, device=a.device, dtype=torch.bool).unsqueeze(-1)).square().sum(),
    "lists": lambda a, b: torch.meshgrid(a[0], b[0], indexing="ij"),
    "same object": lambda a, b: a.to(a.device),
    "empty": lambda a, b: (a[:0], a[:0].clone(), torch.cat([a[:0], a])),
}

NOT_DIFFERENTIABLE = (
    "arange, full, like, new, compare, argmax, in place, in place on a view, assignment, copy_, fill and zero, index_put, out, "
    "out that grows, resize_, bits, view of another dtype, foreach, one_hot-like, from the host, detach, random, copy across, empty"
)
DIFFERENTIABLE = [name for name in ZOO if name not in NOT_DIFFERENTIABLE.split(", ")]


def leaves_of(value: object) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ZOO)
def test_an_operation_takes_the_same_bytes(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and name in ("complex", "view of another dtype"):
        pytest.skip("not defined for it")

    def program(look: Callable[[], None]) -> object:
        a, b = made(6, 10, dtype=dtype), made(6, 10, dtype=dtype)
        look()
        first = ZOO[name](a, b)
        look()
        second = ZOO[name](a, b)  # the recipe of the first is not taken for the same tensors
        look()
        del a, b
        look()
        return first, second

    trace = assert_alike(program)
    assert trace[0][0][0] == 2 * 60 * dtype.itemsize


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward_takes_the_same_bytes(name: str) -> None:
    def program(look: Callable[[], None]) -> object:
        a, b = made(6, 10, grad=True), made(6, 10, grad=True)
        for _ in range(2):
            outputs = leaves_of(ZOO[name](a, b))
            look()
            assert outputs
            outputs = [output.real if output.is_complex() else output for output in outputs]
            sum(output.float().sum().to("cpu:0") for output in outputs).backward()  # type: ignore[union-attr]
            look()
            del outputs
            look()
        return a.grad, b.grad

    assert_alike(program)


MASKS: Mapping[str, Callable[[Tensor], Tensor | None]] = {
    "none": lambda q: None,
    "bool": lambda q: torch.ones(2, 1, 9, 9, dtype=torch.bool, device=q.device).tril(),
    "additive": lambda q: torch.zeros(1, 1, 9, 9, dtype=q.dtype, device=q.device),
    "for each head": lambda q: torch.zeros(2, 4, 9, 9, dtype=q.dtype, device=q.device),
}


@pytest.mark.parametrize("math", [False, True], ids=["fused", "math"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [4, 2], ids=["all heads", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_attention_takes_the_same_bytes(math: bool, mask: str, heads: int, dtype: torch.dtype, grad: bool) -> None:
    backend = SDPBackend.MATH if math else None

    def program(look: Callable[[], None]) -> object:
        q = made(2, 9, 4, 16, dtype=dtype, grad=grad)
        k, v = (made(2, 9, heads, 16, dtype=dtype, grad=grad) for _ in range(2))
        for turn in range(2):
            given = MASKS[mask](q)
            output = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=given, is_causal=given is None and turn == 0,
                enable_gqa=heads != 4,
            )  # fmt: skip
            look()
            if grad:
                output.sum().backward()
                look()
        return output

    if backend is None:
        assert_alike(program)
    else:
        with sdpa_kernel(backend):
            assert_alike(program)


def test_math_attention_keeps_the_scores_and_fused_attention_does_not() -> None:
    def program(look: Callable[[], None]) -> object:
        q, k, v = (made(1, 2, 64, 8, grad=True) for _ in range(3))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        look()
        return output

    fused = traced(program, False)[0][0][0]
    with sdpa_kernel(SDPBackend.MATH):
        math = traced(program, False)[0][0][0]
    assert math - fused >= 2 * 64 * 64 * 4


def test_optimizers_and_recomputation_take_the_same_bytes() -> None:
    def program(look: Callable[[], None]) -> object:
        weights = [torch.nn.Parameter(made(16, 16)) for _ in range(3)]
        optimizer = torch.optim.AdamW(weights)
        for _ in range(2):
            hidden = made(5, 16)
            for weight in weights:
                hidden = torch.utils.checkpoint.checkpoint(lambda x, w: F.silu(x @ w), hidden, weight, use_reentrant=False)
                look()
            hidden.square().mean().backward()
            look()
            optimizer.step()
            optimizer.zero_grad()
            look()
        return weights

    assert_alike(program)


# Random programs: a pool of tensors, operations that add to it, change it or drop from it.

STEPS: Mapping[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda a, b: a.flatten()[:1] + b,
    "flatten": lambda a, b: a.reshape(-1),
    "transpose": lambda a, b: a.transpose(0, -1),
    "copy": lambda a, b: a.contiguous(),
    "clone": lambda a, b: a.clone(),
    "first": lambda a, b: a[:1],
    "rest": lambda a, b: a[len(a) // 2 :],
    "double": lambda a, b: torch.cat([a, a]) if a.numel() < 5000 else a[:1],
    "product": lambda a, b: a.reshape(1, -1) * b.flatten()[:7].reshape(-1, 1) if a.numel() < 500 else a.flatten()[:3],
    "half": lambda a, b: a.to(torch.bfloat16),
    "whole": lambda a, b: a.float(),
    "in place": lambda a, b: a.mul_(0.5) if not a.is_leaf and not _overlaps(a) else a.detach(),
    "sum": lambda a, b: a.sum(-1, keepdim=True),
    "softmax": lambda a, b: a.softmax(-1),
    "silu": lambda a, b: F.silu(a),
    "square": lambda a, b: a @ a.transpose(0, -1) if a.dim() == 2 and len(a) < 60 else a.square(),
    "split": lambda a, b: a.split(max(1, len(a) // 2))[-1],
    "expand": lambda a, b: a.unsqueeze(0).expand(2, *a.shape) if a.dim() < 4 else a,
    "elsewhere": lambda a, b: a.to("cpu:1").to("cpu:0"),
    "index": lambda a, b: a[torch.tensor([0, len(a) - 1])] if len(a) else a,
    "detach": lambda a, b: a.detach(),
}


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9), st.booleans()), min_size=1, max_size=14),
    st.booleans(),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_random_programs_take_the_same_bytes(steps: list[tuple[str, int, int, bool]], grad: bool) -> None:
    def program(look: Callable[[], None]) -> object:
        leaves = [made(4, 6, grad=grad), made(3, 5, grad=grad)]
        pool = list(leaves)
        for name, first, second, drops in steps:
            a, b = pool[first % len(pool)], pool[second % len(pool)]
            if a.numel() and b.numel() and a.dim():
                # Values that backward needs must not be written over: in-place steps only without gradients.
                pool.append(a if grad and name == "in place" else STEPS[name](a, b))
            del a, b
            if drops and len(pool) > 1:
                pool.pop(first % len(pool))
            look()
        total = [tensor.float().sum() for tensor in pool if tensor.requires_grad]
        if total:
            torch.stack(total).sum().backward()
            look()
        return pool, leaves

    assert_alike(program)


def test_what_is_written_through_a_remembered_view_is_written_in_the_argument() -> None:
    """A view that is made by recipe shares its argument's storage, and a new tensor shares none."""
    with SimulatedDevices([GIB], values=False) as devices:
        for _ in range(3):
            a = torch.empty(8, 4, device="cpu:0")
            view, copy = a[2:].t(), a.t().contiguous()
            assert view._inner.untyped_storage()._cdata == a._inner.untyped_storage()._cdata  # type: ignore[attr-defined]
            assert copy._inner.untyped_storage()._cdata != a._inner.untyped_storage()._cdata  # type: ignore[attr-defined]
            assert (view.shape, view.stride(), view.storage_offset()) == ((4, 6), (1, 4), 8)
            assert devices.used == (2 * 8 * 4 * 4,)
            del a, view
            assert devices.used == (8 * 4 * 4,)
            del copy


def test_scalars_of_another_type_have_recipes_of_their_own() -> None:
    """1, 1.0 and True are equal, and what an operation makes of them is not."""
    with SimulatedDevices([GIB], values=False):
        a = torch.zeros(3, dtype=torch.int32, device="cpu:0")
        for _ in range(2):
            assert [(a + 1).dtype, (a + 1.0).dtype, (a * True).dtype] == [torch.int32, torch.float32, torch.int32]
            dtypes = [torch.full((2,), value, device="cpu:0").dtype for value in (1, 1.0, True)]
            assert dtypes == [torch.int64, torch.float32, torch.bool]


def test_nothing_is_allocated_for_tensors_without_values() -> None:
    with SimulatedDevices([2**60], values=False) as devices:
        huge = torch.empty(2**40, device="cpu:0")
        other = (huge * 2).view(2**20, -1)[:5]
        assert devices.used == (2 * 4 * 2**40,) and other.shape == (5, 2**20)


def test_tensors_in_nested_values() -> None:
    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [len(tensor) for tensor in shapes.tensors_in([one, (two, "text", None), {"a": [three]}, 5])] == [1, 2, 3]
