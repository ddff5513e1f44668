"""Principal components of keys and values, per layer and KV head: fitting, keeping, and there and back.

Keys are taken before their rotation by position, where they lie close to a subspace; they are rotated again once they
are expanded, so positions stay what they were.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE_NAME = "visual_kv.components"
"""Where a checkpoint's folder has them: safetensors, but not by name, for others load all of those as weights."""

_NAMES = ("keys", "key_means", "values", "value_means")


@dataclass(frozen=True, slots=True)
class LowRankBasis:
    """An orthonormal basis around a mean, for every layer and KV head. All float32.

    Attributes:
        keys: Directions of unrotated keys, most variance first, [layers, kv_heads, rank, head_dim].
        key_means: [layers, kv_heads, head_dim].
        values: As `keys`.
        value_means: As `key_means`.
    """

    keys: Tensor
    key_means: Tensor
    values: Tensor
    value_means: Tensor

    @property
    def rank(self) -> int:
        """Coefficients per token, head and kind."""
        return self.keys.shape[2]

    def truncated(self, rank: int) -> Self:
        """Returns the basis without all but its first `rank` directions."""
        keys, values = self.keys[:, :, :rank].contiguous(), self.values[:, :, :rank].contiguous()
        return type(self)(keys, self.key_means, values, self.value_means)

    def to(self, device: torch.device) -> Self:
        """Returns it on a device."""
        return type(self)(*(getattr(self, name).to(device) for name in _NAMES))

    def save(self, path: Path, fingerprint: str) -> None:
        """Writes it, with the fingerprint of the weights that it was fitted for."""
        unfinished = path.with_name(f"{path.name}.tmp")
        save_file({name: getattr(self, name).contiguous() for name in _NAMES}, unfinished, {"fingerprint": fingerprint})
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> Self:
        """Reads what `save` wrote. Raises ValueError when it is damaged, or was fitted for other weights."""
        try:
            with safe_open(path, "pt") as file:
                fitted_for = (file.metadata() or {}).get("fingerprint")
                basis = cls(*(file.get_tensor(name) for name in _NAMES))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); run `triptych compress` again") from error
        if fitted_for != fingerprint:
            raise ValueError(f"{path} was fitted for other weights; run `triptych compress` again")
        return basis


def encode(rows: Tensor, vectors: Tensor, mean: Tensor) -> Tensor:
    """Returns the coefficients [tokens, kv_heads, rank] of rows [tokens, kv_heads, head_dim] in one layer's basis."""
    return torch.einsum("thd,hrd->thr", rows - mean, vectors)


def decode(coefficients: Tensor, vectors: Tensor, mean: Tensor) -> Tensor:
    """Returns rows [tokens, kv_heads, head_dim] from coefficients [tokens, kv_heads, rank] in one layer's basis."""
    return torch.einsum("thr,hrd->thd", coefficients, vectors) + mean


class Fit:
    """Adds up what principal components are made from, in float64."""

    def __init__(self, layers: int) -> None:
        self._moments: list[list[_Moments]] = [[_Moments(), _Moments()] for _ in range(layers)]

    def add(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Takes unrotated keys and values [tokens, kv_heads, head_dim] of one layer into account."""
        self._moments[layer][0].add(keys)
        self._moments[layer][1].add(values)

    def basis(self) -> LowRankBasis:
        """Returns all directions: `rank` is `head_dim`."""
        keys, values = ([layer[kind].components() for layer in self._moments] for kind in (0, 1))
        return LowRankBasis(
            *(torch.stack(tensors).float() for tensors in (*zip(*keys, strict=True), *zip(*values, strict=True)))
        )


class _Moments:
    def __init__(self) -> None:
        self._count = 0
        self._sum = torch.zeros(())
        self._square = torch.zeros(())

    def add(self, rows: Tensor) -> None:
        wide = rows.double()
        self._count += len(rows)
        self._sum = self._sum + wide.sum(0)
        self._square = self._square + torch.einsum("thi,thj->hij", wide, wide)

    def components(self) -> tuple[Tensor, Tensor]:
        """Returns directions [kv_heads, head_dim, head_dim] and mean [kv_heads, head_dim]."""
        mean = self._sum / self._count
        covariance = self._square / self._count - torch.einsum("hi,hj->hij", mean, mean)
        vectors = torch.linalg.eigh(covariance).eigenvectors
        return vectors.flip(-1).transpose(-1, -2), mean
