"""Denoising: predict the noise in x_t (Ho et al. 2020), and the variance of the step (Nichol & Dhariwal 2021).

Differences from the published code of these papers: weights multiply the loss of their own sample, and every prediction
can be combined with every variance.

EDM (Karras et al. 2022, "Elucidating the design space of diffusion-based generative models", section 5 and table 1):
the error of the preconditioned network in x0, weighted so that the initial loss is about 1 for every sigma. The target
of the raw network is a mixture of image and noise of unit variance: mostly image for large sigma, mostly noise for
small sigma (`EdmProcess.preconditioned`).

Self-conditioning: the network also receives its own earlier estimate of x0 (Chen et al. 2023, "Analog bits", section
3.2) or of its latents (Jabri et al. 2023, section 3.2). In training this is an estimate from the same x_t, computed
without gradient. Difference from the code of RIN: whether a sample receives its estimate is drawn for each sample, so
that the result does not depend on the batch or the number of processes; the original draws once for a batch.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import Batch, DataSpec, Losses, Network, Objective
from image_diffusion.objectives.label_dropout import DropsConditionParts
from image_diffusion.objectives.timestep_sampling import AtTimes, NoisedOnce, TimestepSampling, UniformTimesteps
from image_diffusion.process.base import NoiseProcess, Steps, broadcast
from image_diffusion.process.denoiser import (
    LEARNED_VARIANCES,
    Prediction,
    Variance,
    clamp,
    log_variance,
    read_output,
    split_output,
    target,
    to_x0_and_eps,
)
from image_diffusion.process.discrete import DiscreteProcess
from image_diffusion.process.edm import EdmProcess
from image_diffusion.process.likelihood import variational_bound


class UniformWeighting(Config):
    """Weight 1 for every prediction."""

    type: Literal["uniform"] = "uniform"

    def weight(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        """[B] from alpha and sigma [B]."""
        return torch.ones_like(alpha)


class SnrWeighting(Config):
    """Weight that converts the error of a prediction to that in eps: 1 for eps, SNR for x0, SNR / (SNR + 1) for v."""

    type: Literal["snr"] = "snr"

    def weight(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        """[B] from alpha and sigma [B]."""
        match prediction:
            case "eps":
                return torch.ones_like(alpha)
            case "x0":
                return _snr(alpha, sigma)
            case "v":
                return alpha**2 / (alpha**2 + sigma**2)
            case _:
                raise AssertionError(f"no weight for {prediction}")


class MinSnrWeighting(Config):
    """Min-SNR weighting: min(SNR, gamma) for SNR in the weight of x0 (Hang et al. 2023, section 3.4)."""

    type: Literal["min_snr"] = "min_snr"
    gamma: float = Field(5.0, gt=0)
    """The largest weight of an x0 error."""

    def weight(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        """[B] from alpha and sigma [B]."""
        truncation = (self.gamma / _snr(alpha, sigma)).clamp(max=1)
        return SnrWeighting().weight(prediction, alpha, sigma) * truncation


class P2Weighting(Config):
    """Weight (k + SNR)^-gamma for every prediction (Choi et al. 2022, "Perception prioritized training")."""

    type: Literal["p2"] = "p2"
    gamma: float = Field(1.0, ge=0)
    """Exponent: larger values reduce the weight of the least noisy times; 0: every weight is 1."""
    k: float = Field(1.0, gt=0)
    """Constant that limits the weight of the noisiest times."""

    def weight(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        """[B] from alpha and sigma [B]."""
        return (self.k + _snr(alpha, sigma)) ** -self.gamma


Weighting = Annotated[UniformWeighting | SnrWeighting | MinSnrWeighting | P2Weighting, Field(discriminator="type")]
"""Weights of the squared error, one for each sample, as functions of its noise level.

SNR = alpha^2 / sigma^2. The weight of an x0 error determines that of the same error in eps or v, which is the weight
times 1 / SNR or 1 / (SNR + 1). Levels with sigma or alpha 0 give finite weights.
"""


def _snr(alpha: Tensor, sigma: Tensor) -> Tensor:
    """Return the SNR, between 1e-20 and 1e9 for levels of unit variance, so that no weight is infinite or NaN."""
    return alpha.square().clamp(min=1e-20) / sigma.square().clamp(min=1e-9)


Loss = Literal["simple", "hybrid", "rescaled_hybrid", "kl", "rescaled_kl"]


class Denoising(DropsConditionParts):
    """Predict eps, x0, v or previous_x."""

    type: Literal["denoising"] = "denoising"
    prediction: Literal["eps", "x0", "v", "previous_x"] = "eps"
    """Quantity that the network predicts."""
    variance: Variance = "fixed_large"
    """Variance of the reverse process. To learn it, the network has twice the output channels."""
    loss: Loss = "simple"
    """simple: squared error. hybrid: squared error, and the variational bound for the learned variance alone;
    rescaled_hybrid: the bound times num_timesteps / 1000. kl: the bound; rescaled_kl: times num_timesteps."""
    weighting: Weighting = UniformWeighting()
    """Weight of the squared error at each noise level."""
    timestep_sampling: TimestepSampling = UniformTimesteps()
    """Distribution from which timesteps are drawn."""
    label_drop_probability: float = Field(0.0, ge=0, le=1)
    """Probability that a label is replaced by the null label, for classifier-free guidance."""

    @model_validator(mode="after")
    def _consistent(self) -> Denoising:
        learned, hybrid = self.variance in LEARNED_VARIANCES, self.loss in ("hybrid", "rescaled_hybrid")
        if hybrid and not learned:
            raise ValueError(
                f"Loss {self.loss} teaches a variance, but variance is {self.variance}. "
                "Set variance to learned_range, or loss to simple."
            )
        if self.loss == "simple" and learned:
            raise ValueError(
                f"Loss simple teaches no variance, but variance is {self.variance}. "
                "Set loss to hybrid, or variance to fixed_large."
            )
        if self.weighting.type != "uniform" and (self.prediction == "previous_x" or self.loss in ("kl", "rescaled_kl")):
            raise ValueError(
                f"Weighting {self.weighting.type} is of a squared error in eps, x0 or v; got prediction "
                f"{self.prediction} with loss {self.loss}. Set weighting to uniform."
            )
        return self

    def build(self, process: NoiseProcess, spec: DataSpec) -> Objective:
        """Return the objective for data on a process. Raises ValueError if they cannot be combined."""
        return self.timestep_sampling.wrap(DenoisingObjective(self, process, spec), process)


class DenoisingObjective(NoisedOnce):
    """Objective that returns one loss per sample of a batch, the sum of its parts "mse" and "vb" (in bits), if
    present."""

    def __init__(self, config: Denoising, process: NoiseProcess, spec: DataSpec) -> None:
        if isinstance(process, EdmProcess):
            raise ValueError(
                "The edm process preconditions its network, which objective denoising does not support. Use objective "
                "edm."
            )
        needs_steps = config.loss != "simple" or config.prediction == "previous_x"
        if needs_steps and not isinstance(process, DiscreteProcess):
            raise ValueError(
                f"Loss {config.loss} with prediction {config.prediction} needs a discrete process. "
                "Use loss simple and prediction eps, x0 or v with this one."
            )
        super().__init__(config, process, spec)
        self._config = config

    def losses_at(self, network: Network, x: Tensor, t: Tensor, noise: Tensor, cond: dict[str, Tensor]) -> Losses:
        levels = self._process.levels(t)
        alpha, sigma = broadcast(levels, x)
        x_t = alpha * x + sigma * noise
        output = network(self._process.network_input(x_t), self._process.network_time(t), **cond).to(x.dtype)
        predicted, raw = split_output(output, x.shape[1], self._config.variance)

        parts = {}
        if self._config.loss not in ("kl", "rescaled_kl"):
            weight = self._config.weighting.weight(self._config.prediction, *levels).to(x.dtype)
            error = self._target(x, noise, x_t, t) - predicted
            parts["mse"] = error.square().flatten(1).mean(1) * weight
            if raw is not None:
                output = torch.cat([predicted.detach(), raw], 1)  # the bound trains only the variance
        if self._config.loss != "simple":
            parts["vb"] = self._bound_weight() * self._bound(output, raw, x, x_t, t)
        loss = torch.stack(list(parts.values())).sum(0)
        return Losses(loss, {name: part.detach() for name, part in parts.items()}, self._process.fraction(t))

    def _target(self, x: Tensor, noise: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        if self._config.prediction == "previous_x":
            return self._step(t, x).posterior_mean(x, x_t)
        return target(self._config.prediction, x, noise, *broadcast(self._process.levels(t), x))

    def _bound(self, output: Tensor, raw: Tensor | None, x: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Return the term of the variational bound at each sample's timestep, in bits per dimension: [B]."""
        step = self._step(t, x)
        denoised = read_output(output, x_t, step, self._config.prediction, self._config.variance)
        mean, log_var = step.reverse_mean(denoised, x_t), log_variance(raw, self._config.variance, step)
        return variational_bound(x, x_t, step, mean, log_var, ends_clean=t == 0)

    def _bound_weight(self) -> float:
        assert isinstance(self._process, DiscreteProcess)
        num_timesteps = self._process.num_timesteps
        # T turns the mean over timesteps into their sum, the bound; the hybrid divides by 1,000, so that mse dominates
        return {"rescaled_hybrid": num_timesteps / 1000, "rescaled_kl": num_timesteps}.get(self._config.loss, 1.0)

    def _step(self, t: Tensor, x: Tensor) -> Steps:
        assert isinstance(self._process, DiscreteProcess)
        return self._process.steps_on(x.device).at(t, x)


class EdmDenoising(DropsConditionParts):
    """Denoise with the preconditioning of the edm process."""

    type: Literal["edm"] = "edm"
    label_drop_probability: float = Field(0.0, ge=0, le=1)
    """Probability that a label is replaced by the null label, for classifier-free guidance."""

    prediction: ClassVar[Prediction] = "x0"
    """Quantity that the preconditioned network predicts."""
    variance: ClassVar[Variance] = "fixed_small"
    """No variance is learned."""

    def build(self, process: NoiseProcess, spec: DataSpec) -> EdmObjective:
        """Return the objective for data on a process. Raises ValueError unless the process is edm."""
        if not isinstance(process, EdmProcess):
            raise ValueError(
                "Objective edm needs the edm process. Set process.type to edm, or objective.type to another."
            )
        return EdmObjective(self, process, spec)


class EdmObjective(NoisedOnce):
    """Objective that returns one loss per sample of a batch: the weighted squared error of x0."""

    _process: EdmProcess

    def losses_at(self, network: Network, x: Tensor, t: Tensor, noise: Tensor, cond: dict[str, Tensor]) -> Losses:
        """Return the losses of x [B, C, …] at sigmas t [B] with noise like x. Draws no random numbers."""
        _, sigma = broadcast(self._process.levels(t), x)
        denoise = self._process.preconditioned(network)
        x0 = denoise(x + sigma * noise, self._process.network_time(t), **cond)
        mse = (x - x0).square().flatten(1).mean(1) * self._process.loss_weight(t).to(x.dtype)
        return Losses(mse, {"mse": mse.detach()}, self._process.fraction(t))


class SelfConditioning(Config):
    """Settings for conditioning a network on its own earlier estimate."""

    probability: float = Field(0.9, ge=0, le=1)
    """Share of the training samples with an estimate; 0: training and sampling use no estimates."""
    clamp: bool = True
    """Clip the estimated x0 to [-1, 1] before the network receives it. Set false for latents."""

    def check_latents(self) -> None:
        """Raise ValueError if estimates of latents would be clipped to the range of pixels."""
        if self.clamp and self.probability > 0:
            raise ValueError(
                "self_conditioning.clamp holds the estimate to [-1, 1], the range of pixels, but the network works on "
                "latents, which go beyond it. Set system.self_conditioning.clamp to false."
            )


class SelfConditionedObjective(AtTimes):
    """Denoising with two passes of the network, the first without gradient; one loss per sample.

    network: called as network(x, t, **cond, return_latents=True) -> (prediction, latents, norm [B]), where cond may
    hold "self_cond" like x and "latents" as returned; rows of zeros stand for none. The loss is its part "mse"; the
    norm is reported as "latent_norm".
    """

    def __init__(self, config: SelfConditioning, denoising: Denoising, process: NoiseProcess, spec: DataSpec) -> None:
        super().__init__(denoising, process, spec)
        self._config, self._prediction = config, denoising.prediction
        self._denoising = DenoisingObjective(denoising, process, spec)

    def at_times(self, network: Any, batch: Batch, t: Tensor) -> Losses:
        """Draw noise for each sample, choose the samples that receive an estimate, and drop labels."""
        noise = batch.streams.normal("noise", tuple(batch.x.shape[1:]))
        self_conditioned = batch.streams.event("self_conditioning", self._config.probability)
        return self.losses_at(network, batch.x, t, noise, self_conditioned, self._drop_labels(batch, network))

    def losses_at(
        self, network: Any, x: Tensor, t: Tensor, noise: Tensor, self_conditioned: Tensor, cond: dict[str, Tensor]
    ) -> Losses:
        """Return the losses of x [B, C, …] at times t [B] with noise like x; self_conditioned: bool [B],
        the samples with an estimate."""
        if self._config.probability > 0:
            cond = cond | self.estimate(network, x, t, noise, self_conditioned, cond)
        norms = {}

        def tracked(x_t: Tensor, time: Tensor, /, **cond: Tensor) -> Tensor:
            output: Tensor
            output, _, norm = network(x_t, time, **cond, return_latents=True)
            norms["latent_norm"] = norm.detach()
            return output

        losses = self._denoising.losses_at(tracked, x, t, noise, cond)
        return Losses(losses.loss, losses.parts | norms, losses.time)

    @torch.no_grad()
    def estimate(
        self, network: Any, x: Tensor, t: Tensor, noise: Tensor, self_conditioned: Tensor, cond: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return "self_cond" and "latents" of a first pass, zero in rows without an estimate."""
        alpha, sigma = broadcast(self._process.levels(t), x)
        x_t = alpha * x + sigma * noise
        time = self._process.network_time(t)
        output, latents, _ = network(self._process.network_input(x_t), time, **cond, return_latents=True)
        x0, _ = to_x0_and_eps(self._prediction, output.to(x.dtype), x_t, alpha, sigma)
        x0 = clamp(x0) if self._config.clamp else x0
        return {
            "self_cond": torch.where(self_conditioned[:, None, None, None], x0, 0),
            "latents": torch.where(self_conditioned[:, None, None], latents, 0),
        }
