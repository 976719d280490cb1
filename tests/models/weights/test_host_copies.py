# SPDX-License-Identifier: Apache-2.0
"""Weights that go to host memory and back: what is frozen is copied once, what is trained as it is, nothing is lost.

The device is the CPU here. That a GPU gives its memory back, and samples the same pictures afterwards, is in
tests/gpu/test_sleep_on_cuda.py.
"""

import torch
from torch import nn

from models.weights.host_copies import HostCopies


def norm() -> nn.BatchNorm1d:
    """A module with a trained weight, a frozen bias, and buffers."""
    module = nn.BatchNorm1d(4)
    module.bias.requires_grad_(False)
    return module


def test_what_is_trained_comes_back_as_it_left_and_what_is_frozen_as_it_left_first() -> None:
    module = norm()
    weight, bias = module.weight, module.bias
    copies = HostCopies([module], trained=[weight])
    for turn in range(3):
        with torch.no_grad():
            weight.fill_(turn)
            bias.fill_(turn)  # nobody may: it shows that the first copy came back
            module.running_mean.fill_(turn)
        copies.leave()
        copies.come_back("cpu")
        assert (module.weight, module.bias) == (weight, bias), "an optimiser or a graph knows the parameters themselves"
        assert weight.eq(turn).all()
        assert module.running_mean.eq(turn).all()
        assert bias.eq(0).all()
    assert (weight.requires_grad, bias.requires_grad) == (True, False)


def test_the_hosts_memory_is_taken_once() -> None:
    module = norm()
    copies, places = HostCopies([module], trained=[module.weight]), []
    for _ in range(2):
        there = [p.data_ptr() for p in module.parameters()]
        copies.leave()
        places.append([p.data_ptr() for p in module.parameters()])
        assert not set(there) & set(places[-1]), "the device's memory is still held"
        copies.come_back("cpu")
    assert places[0] == places[1]


def test_what_is_loaded_while_they_are_away_comes_back() -> None:
    module = norm()
    copies = HostCopies([module], trained=[module.weight])
    copies.leave()
    with torch.no_grad():
        module.weight.fill_(7)
    copies.come_back("cpu")
    assert module.weight.eq(7).all()


def test_what_is_trained_may_be_left_out_and_is_no_number_until_it_is_loaded() -> None:
    """It takes no host memory, and whoever samples before it is loaded has no picture instead of an old one."""
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    bias, strides = module.bias.detach().clone(), module.weight.stride()
    copies = HostCopies([module], trained=[module.weight])
    for _ in range(2):
        copies.leave(with_trained=False)
        assert module.weight.shape == (4, 3, 3, 3)
        assert module.weight.untyped_storage().nbytes() == module.weight.element_size()
        copies.come_back("cpu")
        assert module.weight.isnan().all()
        assert module.weight.stride() == strides
        assert torch.equal(module.bias, bias)
        with torch.no_grad():
            module.weight.fill_(3)
    copies.leave()
    copies.come_back("cpu")
    assert module.weight.eq(3).all()


def test_what_begins_in_host_memory_is_its_own_copy_and_a_second_leave_does_nothing() -> None:
    module = norm()
    begun = [p.data_ptr() for p in module.parameters()]
    copies = HostCopies([module], away=True)
    copies.leave()
    copies.come_back("cpu")
    copies.come_back("cpu")
    assert not {p.data_ptr() for p in module.parameters()} & set(begun)
    copies.leave()
    copies.leave()
    assert [p.data_ptr() for p in module.parameters()] == begun


def test_the_copies_lie_in_one_piece_of_memory_that_can_be_locked() -> None:
    """One after the other and none over another, whatever their formats."""
    module = nn.Sequential(norm(), nn.Linear(3, 5).to(torch.bfloat16), nn.Conv2d(3, 4, 3))
    expected = [weight.clone() for weight in module.state_dict().values()]
    HostCopies([module]).leave()
    weights = [*module.state_dict().values()]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert all(weight.data_ptr() % 64 == 0 for weight in weights)
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))


def test_strides_survive() -> None:
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    strides = module.weight.stride()
    copies = HostCopies([module])
    copies.leave()
    copies.come_back("cpu")
    assert module.weight.stride() == strides
