"""The decoder's arithmetic. It knows tokens, positions and slots; not sequences, requests or blocks."""

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from triptych.worker.kv.cache import KVCache
from triptych.worker.model.attention import AttentionBatch, paged_attention
from triptych.worker.model.config import DecoderConfig
from triptych.worker.model.rotary import Rotary, rotate
from triptych.worker.model.weights import DecoderWeights, LayerWeights


class Decoder:
    """A Llama-family decoder (Touvron et al., arXiv:2302.13971) over a paged KV cache. Holds weights, no state."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        embedding = weights.embedding
        self._rotary = Rotary(config.rope, config.head_dim, config.context_tokens, embedding.device, embedding.dtype)

    def forward(self, embedded: Tensor, positions: Tensor, batch: AttentionBatch, cache: KVCache) -> Tensor:
        """Runs all layers, writes the tokens' keys and values into the cache and returns hidden states, not yet normed.

        Args:
            embedded: [tokens, hidden].
            positions: Place of each token in its sequence, [tokens].
            batch: How the tokens attend and where their keys and values go.
            cache: The paged cache.

        Returns:
            [tokens, hidden].
        """
        cosines, sines = self._rotary.at(positions)
        hidden = embedded
        for index, layer in enumerate(self.weights.layers):
            normed = self._norm(hidden, layer.attention_norm)
            hidden = hidden + self._attend(normed, layer, index, cosines, sines, batch, cache)
            normed = self._norm(hidden, layer.mlp_norm)
            gate, up = linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate) * up, layer.down)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 logits [rows, vocabulary] of hidden states [rows, hidden]."""
        return linear(self._norm(hidden, self.weights.final_norm), self.weights.head).float()

    def _attend(
        self,
        normed: Tensor,
        layer: LayerWeights,
        index: int,
        cosines: Tensor,
        sines: Tensor,
        batch: AttentionBatch,
        cache: KVCache,
    ) -> Tensor:
        config = self.config
        projected = linear(normed, layer.qkv, layer.qkv_bias).view(
            -1, config.heads + 2 * config.kv_heads, config.head_dim
        )
        # Queries and keys turn together: they are neighbours in the fused projection.
        turned = rotate(projected[:, : config.heads + config.kv_heads], cosines, sines)
        queries, keys = turned[:, : config.heads], turned[:, config.heads :]
        cache.write(index, batch.slots, keys, projected[:, config.heads + config.kv_heads :])
        attended = paged_attention(queries, cache.keys[index], cache.values[index], batch)
        for beside in batch.beside:
            attended[beside.row] = beside.attend(queries[beside.row], index)
        return linear(attended.flatten(1), layer.attention_output)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (Zhang and Sennrich, arXiv:1910.07467): statistics in float32, scaled in the model's type."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_epsilon)
        return weight * wide.to(hidden.dtype)
