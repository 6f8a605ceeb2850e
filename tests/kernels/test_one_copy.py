"""Several tensors moved to a device in one copy."""

import torch

from tailrace.kernels.one_copy import ALIGNED_BYTES, one_copy

TENSORS = [
    torch.tensor([0.5, -1.5, torch.inf]),
    torch.tensor([-1, 2**62], dtype=torch.int64),
    torch.tensor([[1, 2, 3]], dtype=torch.int32),
    torch.empty(0, 4),
    torch.tensor([7], dtype=torch.int32),
]


def test_each_tensor_arrives_as_it_was(device: torch.device) -> None:
    moved = one_copy(TENSORS, device)
    assert [(t.dtype, t.shape) for t in moved] == [(t.dtype, t.shape) for t in TENSORS]
    assert all(a.cpu().equal(b) and a.is_contiguous() for a, b in zip(moved, TENSORS, strict=True))


def test_all_of_them_lie_in_one_block_and_begin_where_kernels_expect_it(
    device: torch.device,
) -> None:
    moved = one_copy(TENSORS, device)
    assert len({tensor.untyped_storage().data_ptr() for tensor in moved}) == 1
    assert all(
        tensor.storage_offset() * tensor.element_size() % ALIGNED_BYTES == 0 for tensor in moved
    )
