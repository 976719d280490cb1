# SPDX-License-Identifier: Apache-2.0
"""Direct preference: a pair of samples of one prompt, of which one is better."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.algorithms.losses import REF_VELOCITY, DiffusionLossFn, DiffusionLossResult, register_diffusion_loss
from models.schedulers.kernels import mean_dims

if TYPE_CHECKING:
    from models.config.actor import DiffusionActorConfig


@register_diffusion_loss("dpo")
class DPOLoss(DiffusionLossFn):
    """Diffusion-DPO (arXiv 2311.12908) in the form for flow matching.

    Offline the pairs come from a data set; online they are the best and the worst sample of each group, and a group
    whose rewards are all equal gives none.
    """

    process = "forward"
    paired = True
    required_model_output_keys = ("velocity",)
    required_data_keys = ("clean_latents", "noise", REF_VELOCITY)

    @classmethod
    def compute_loss(
        cls,
        *,
        velocity: Tensor,
        ref_velocity: Tensor,
        clean_latents: Tensor,
        noise: Tensor,
        config: "DiffusionActorConfig",
    ) -> tuple[Tensor, dict[str, Any]]:
        """L = -mean log sigmoid(-beta/2 [(m_w - ref_w) - (m_l - ref_l)]), m = mean_dims (v - (e - x0))^2.

        Args:
            velocity, ref_velocity: [B, ...], of the policy and of the starting weights; rows 2i are the better ones (w)
                and rows 2i+1 the worse (l) of a pair.
            clean_latents, noise: [B, ...], x0 and e.
            config: the actor's settings; `dpo_beta` is read.

        Raises:
            ValueError: B is odd.
        """
        if len(velocity) % 2:
            raise ValueError(f"loss dpo compares pairs but was given {len(velocity)} samples, an odd number")
        target = noise - clean_latents
        error, ref_error = mean_dims((velocity - target) ** 2), mean_dims((ref_velocity - target) ** 2)
        implicit_reward = -config.diffusion_loss.dpo_beta / 2 * (error - ref_error)
        chosen, rejected = implicit_reward[0::2], implicit_reward[1::2]
        margin = chosen - rejected
        metrics = {
            "implicit_acc": (margin.detach() > 0).float().mean(),
            "rewards/chosen": chosen.detach().mean(),
            "rewards/rejected": rejected.detach().mean(),
            "rewards/margins": margin.detach().mean(),
        }
        return -torch.nn.functional.logsigmoid(margin).mean(), metrics

    @staticmethod
    def prepare_actor_batch(batch: Any, reward_tensor: Tensor, config: Any) -> Any:
        """The best and the worst sample of each prompt uid, one pair after the other; ties give no pair.

        Args:
            batch: `FinishedLatents` of B samples.
            reward_tensor: [B], the advantages; NaN where a sample is left out.
            config: not read.

        Returns:
            2 P samples of the P pairs: rows 2i are the better ones, rows 2i+1 the worse.
        """
        groups: dict[str, list[int]] = {}
        for index, key in enumerate(batch.keys):
            if not reward_tensor[index].isnan():
                groups.setdefault(key.prompt_uid, []).append(index)
        order: list[int] = []
        for members in groups.values():
            pair = [max(members, key=reward_tensor.__getitem__), min(members, key=reward_tensor.__getitem__)]
            if reward_tensor[pair[0]] > reward_tensor[pair[1]]:
                order += pair
        return batch.scored(torch.tensor(order, dtype=torch.long), reward_tensor)

    def __call__(
        self, *, config: "DiffusionActorConfig", model_output: Mapping[str, Any], data: Mapping[str, Any]
    ) -> DiffusionLossResult:
        given = {key: data[key] for key in self.required_data_keys}
        return DiffusionLossResult(*self.compute_loss(velocity=model_output["velocity"], config=config, **given))
