"""Attention within documents: by lengths, by bounds for PyTorch's `varlen_attn`, and by a mask."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

from data.tokenizer import TextSpec
from models import documents
from models.attention import attention
from tests.making import make_objective

DOCUMENTS = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.int32)
OTHERS = torch.tensor([[0, 1, 1, 1], [0, 1, 2, 3], [5, 5, 4, 4]], dtype=torch.int32)
CUDA = torch.device("cuda")


def mask_of(documents_BL: Tensor) -> Tensor:
    far = documents.within(documents_BL.to("meta"), 0, torch.bfloat16, 64)
    assert isinstance(far, Tensor)
    assert far.shape == (3, 1, 4, 4), "on other devices the host may not wait for numbers"
    return (documents_BL[:, :, None] == documents_BL[:, None, :]).tril()[:, None]


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, *segments: Any, window_size: tuple[int, int]
) -> Tensor:
    """Computes attention segment by segment, and checks the arguments as the kernel does."""
    bounds, bounds_of_keys, longest, longest_of_keys = segments
    assert (bounds_of_keys is bounds, longest_of_keys, window_size) == (True, longest, (-1, 0))
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    assert query.shape == key.shape == value.shape
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert bounds.dtype == torch.int32
    parts = []
    for first, last in pairwise(bounds.tolist()):
        assert 0 <= last - first <= longest
        heads = (x[first:last].transpose(0, 1).double()[None] for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        parts.append(mixed[0].transpose(0, 1).to(query.dtype))
    return torch.cat(parts)


@pytest.mark.parametrize("documents_BL", [DOCUMENTS, OTHERS])
def test_documents_begin_where_their_numbers_change(documents_BL: Tensor) -> None:
    lengths = documents.within(documents_BL, 0, torch.float32, 8)
    assert lengths == ([2, 2, 3, 1, 4] if documents_BL is DOCUMENTS else [1, 3, 1, 1, 1, 1, 2, 2])
    bounds, longest = documents.packed(documents_BL, 4)
    assert (bounds.shape, bounds.dtype, longest) == ((13,), torch.int32, 4)
    assert bounds.diff().tolist() == lengths + [0] * (12 - len(lengths))
    with pytest.raises(RuntimeError, match="more documents than its data said"):
        documents.packed(OTHERS, 2)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_bounds_attend_as_a_mask_does(key_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_varlen", varlen_attn)
    inputs = [torch.randn(3, 4, heads, 8).bfloat16() for heads in (4, key_heads, key_heads, 4)]
    *inputs, grad = (x.transpose(1, 2) for x in inputs)
    results = []
    for kind in (torch.bfloat16, torch.float64):
        query, key, value = (x.to(kind, copy=True).requires_grad_() for x in inputs)
        shared = key_heads < 4
        if kind == torch.bfloat16:
            seen = documents.packed(DOCUMENTS, 3)
            mixed = documents.attention_packed(query, key, value, seen, shared)
        else:
            mixed = attention(query, key, value, mask_of(DOCUMENTS), False, shared)
        mixed.backward(grad.to(kind))
        results.append((mixed, query.grad, key.grad, value.grad))
    step = 4 * torch.finfo(torch.bfloat16).eps
    for mine, exact in zip(*results, strict=True):
        assert_close(mine.double(), exact, rtol=step, atol=step)


def test_pytorchs_kernel_takes_these_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as shapes go: tensors without values stand in for those of a GPU."""
    monkeypatch.setattr(documents, "_varlen", torch.nn.attention.varlen.varlen_attn)
    query, key, value = leaves = [
        torch.empty(3, heads, 4, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads in (4, 2, 2)
    ]
    seen = documents.packed(DOCUMENTS.to("meta"), 3)
    mixed = documents.attention_packed(query, key, value, seen, True)
    assert (mixed.shape, mixed.dtype) == (leaves[0].shape, torch.bfloat16)
    mixed.sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape


def test_other_documents_are_no_other_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_varlen", torch.compiler.disable(varlen_attn))
    monkeypatch.setattr(documents, "suits_kernel", lambda *_: True)
    spec = TextSpec(vocab_size=11, seq_len=4, most_documents=4)
    shape = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "forward_dtype": "bfloat16"}
    net = make_objective("gpt", spec, **shape).model
    tokens, counter = torch.randint(11, (3, 4)), CompileCounter()
    compiled = torch.compile(net, backend=counter)
    seen = []
    for documents_BL in (DOCUMENTS, OTHERS):
        mine = compiled(tokens, documents_BL)
        seen.append(counter.frame_count)
        assert_close(mine, net(tokens, documents_BL), rtol=0.03, atol=0.03)
    assert seen[0] == seen[1] > 0
