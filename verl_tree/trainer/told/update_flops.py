"""FLOPs of an update: of what was computed, and of flat rows, both by verl's own estimate of a model.

verl (0.9.1) estimates forward and backward: 6 FLOPs per weight and token, and attention by half the square of a row,
which is what a causal mask shows. It takes the embedding for a product as large as that of the output head, and gives
both to every token. Here a look-up costs nothing, and the head runs where a score is read. All else is as in verl:
recomputed activations do not count, a frozen weight counts as a trained one, and a vision tower does not count.
"""

from collections.abc import Sequence

from verl.utils.flops_counter import FlopsCounter
from verl.workers.engine import BaseEngine

from verl_tree.engine import TreeEngine
from verl_tree.engine.rows.computed_paths import ComputedPaths

_PER_WEIGHT = 6
"""FLOPs of a weight on a token: 2 forward and 4 backward."""


class UpdateFlops:
    """Counts the FLOPs of forward and backward on all ranks; 0 for a model that verl's counter does not know."""

    def __init__(self, counter: FlopsCounter, *, is_critic: bool) -> None:
        self._counter, self._is_critic = counter, is_critic

    def of_rows(self, lens: Sequence[int]) -> float:
        """Return verl's estimate of flat rows, given their lengths."""
        # verl gives TFLOPs per second, so those of 1e-12 s are FLOPs.
        return self._counter.estimate_flops(list(lens), 1e-12)[0]

    def of_paths(self, paths: ComputedPaths) -> float:
        """Return the FLOPs of what was computed."""
        of_verl = self.of_rows(paths.lens) - self.of_rows(paths.shared_lens)
        if not of_verl:
            return 0.0
        text = self._counter.config.get_text_config(decoder=True)
        of_vocabulary = _PER_WEIGHT * text.hidden_size * text.vocab_size
        of_head = _PER_WEIGHT * text.hidden_size if self._is_critic else of_vocabulary
        return of_verl - 2 * of_vocabulary * paths.num_tokens + of_head * paths.num_projected

    def share(self, paths: ComputedPaths, row_lens: Sequence[int]) -> float:
        """Return the FLOPs of what was computed over verl's estimate of the flat rows; 1 if that is 0."""
        flat = self.of_rows(row_lens)
        return self.of_paths(paths) / flat if flat else 1.0

    def both_mfus(self, flat_mfu: float, *, engine: BaseEngine, row_lens: Sequence[int]) -> dict[str, float]:
        """Return `mfu` of what the engine computed last, and verl's own of the flat rows as `mfu_flat_equivalent`."""
        is_tree = isinstance(engine, TreeEngine)
        paths = engine.computed_paths if is_tree else ComputedPaths.flat(row_lens)
        return {"mfu": flat_mfu * self.share(paths, row_lens), "mfu_flat_equivalent": flat_mfu}
