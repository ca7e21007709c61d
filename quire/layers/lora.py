"""Adapters on the layers of a loaded model: `AdapterLayers` puts itself around the quantisation
methods of the layers, so that no model knows of it.

What an adapter adds is added to what a layer computes, before ranks sum up. A fused layer has a
pair of A and B for each module of the checkpoint that it stands for. A step in which no token uses
an adapter computes as if there were none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from quire.kernels import dispatch
from quire.kernels.adapter_pool import (
    CHUNK_ROWS,
    HAS_BIAS,
    HAS_GAINS,
    AdapterPool,
    AdapterSlice,
    AdapterTokens,
    LayerAdapters,
)
from quire.kernels.cpu.linear import PackedMatrix
from quire.kernels.cpu.lora import native_adapters
from quire.layers.decoder import FusedLayers
from quire.layers.embedding import Embedding, LMHead, VocabEmbedding
from quire.layers.expert_adapters import ExpertAdapters
from quire.layers.experts import ExpertLinear, Experts
from quire.layers.linear import LatentLinear, Linear
from quire.layers.quantization.matrices import DenseMatrix
from quire.layers.quantization.packed import PackFloats
from quire.layers.weights import (
    Axis,
    Build,
    Cut,
    Matrix,
    MatrixLayer,
    NormWeight,
    QuantizationMethod,
    Shard,
    ShardKey,
    WeightedLayer,
)
from quire.protocol.errors import AdapterError

logger = logging.getLogger(__name__)

ALIGNMENT = 16
"""Numbers of the pool: kernels read vectors."""
ROWS_AT_ONCE = 4096
"""Of a weight, where it is made floats for norms."""
MAX_NAMED = 8
_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
"""As adapters name them, whatever a checkpoint calls them."""
_EXPERT_NAME = re.compile(rf"(.+)\.experts\.(0|[1-9]\d*)\.({'|'.join(_EXPERT_PARTS)})", re.ASCII)


class LoraWeights(Protocol):
    """What an adapter has for one module, as `loading` reads it."""

    @property
    def a(self) -> Tensor | None:
        """[rank, inputs]; of an embedding [rank, rows]."""

    @property
    def b(self) -> Tensor | None:
        """[outputs, rank], without the scaling; of an embedding [dim, rank]."""

    @property
    def scaling(self) -> float: ...

    @property
    def bias(self) -> Tensor | None:
        """[outputs], without the scaling: that of B."""

    @property
    def magnitude(self) -> Tensor | None:
        """[outputs], with DoRA: the norms that rows of W + scaling B A are given."""

    @property
    def saved(self) -> Mapping[str, Tensor]:
        """What takes the place of the module's own "weight" or "bias"."""


class Names(Protocol):
    """Which modules of a checkpoint each of our layers stands for."""

    def modules(self, path: str) -> dict[ShardKey, str]: ...

    @property
    def num_experts(self) -> int:
        """Of each layer that has some."""
        ...

    @property
    def rename(self) -> Callable[[str], str]: ...


@dataclass(frozen=True)
class HostAdapter:
    """One rank's share of an adapter, in host memory, laid out as its chunks are."""

    runs: Sequence[Sequence[tuple[int, Tensor]]]
    """Of each chunk, what goes to which offset."""
    state: Tensor
    """int32: counts of chunks, then vectors, of each slice."""
    saved: Mapping[str, Matrix]
    """What takes the place of the matrices of whole layers, by our path."""
    has_experts: bool
    """On any rank."""
    has_saved: bool
    """Whether whole matrices are replaced, on any rank."""
    nbytes: int

    @property
    def num_chunks(self) -> int:
        return len(self.runs)


@dataclass(frozen=True)
class _Place:
    """Where the matrices that an adapter has for a module of the checkpoint belong."""

    layer: MatrixLayer
    """The one with the weight."""
    path: str
    shard_key: ShardKey
    index: int
    """Of its slice."""
    one: AdapterSlice
    cuts: Sequence[Cut]
    """What this rank keeps of the module."""
    shape: tuple[int, int]
    """[outputs, inputs] of the pair in an adapter's file."""
    is_embedding: bool = False
    is_expert: bool = False
    can_be_replaced: bool = False
    """By a whole weight."""

    def cut_a(self, a: Tensor) -> Tensor:
        """What this rank keeps of A [rank, inputs], with padding."""
        if self.is_embedding:
            return _joined([(a.t()[cut.outputs], cut.shape[0]) for cut in self.cuts]).t()
        return _joined([(a.t()[self.cuts[0].inputs], self.cuts[0].shape[1])]).t()

    def cut_outputs(self, values: Tensor) -> Tensor:
        """What this rank keeps of numbers for each output, with padding."""
        if self.is_embedding:
            return _joined([(values[self.cuts[0].inputs], self.cuts[0].shape[1])])
        return _joined([(values[cut.outputs], cut.shape[0]) for cut in self.cuts])

    @property
    def has_all_inputs(self) -> bool:
        inputs = self.layer.axes["weight"][-1]
        return all(shard.kept == shard.full for shard in inputs)

    @property
    def adds_bias(self) -> bool:
        """Whether it is this rank that adds to the outputs what is added once."""
        return self.has_all_inputs or all(
            shard.start == 0 for shard in self.layer.axes["weight"][-1]
        )


def _joined(parts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Parts one after the other, each with zeros up to its size."""
    padded = []
    for part, size in parts:
        missing = part.new_zeros(size - len(part), *part.shape[1:])
        padded.append(torch.cat((part, missing)) if len(missing) else part)
    return padded[0] if len(padded) == 1 else torch.cat(padded)


class _Layout:
    """Gives out the numbers of a chunk: rows of A and B of all slices first, so that those of an
    adapter which has all of them lie in one piece, then vectors."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int, int]] = []
        """First output, outputs and inputs of each slice."""
        self.num_with_vectors = 0

    def add(self, first: int, num_outputs: int, num_inputs: int) -> int:
        """The index of a new slice. Those without vectors come last."""
        self.sizes.append((first, num_outputs, num_inputs))
        return len(self.sizes) - 1

    def end_vectors(self) -> None:
        """Slices from here on have no vectors."""
        self.num_with_vectors = len(self.sizes)

    def slices(self, counts: Tensor, vectors: Tensor) -> list[AdapterSlice]:
        """`counts` and `vectors` are [slots, slices]."""
        found, at = [], 0
        after = sum(CHUNK_ROWS * (_aligned(n) + _aligned(k)) for _, n, k in self.sizes)
        for index, (first, num_outputs, num_inputs) in enumerate(self.sizes):
            width, inputs = _aligned(num_outputs), _aligned(num_inputs)
            found.append(
                AdapterSlice(
                    first=first,
                    num_outputs=num_outputs,
                    num_inputs=num_inputs,
                    a_offset=at,
                    a_stride=inputs,
                    b_offset=at + CHUNK_ROWS * inputs,
                    b_stride=width,
                    bias_offset=after,
                    gains_offset=after + width,
                    counts=counts[:, index],
                    vectors=vectors[:, index],
                )
            )
            at += CHUNK_ROWS * (inputs + width)
            if index < self.num_with_vectors:
                after += 2 * width
        return found

    @property
    def chunk_size(self) -> int:
        rows = sum(CHUNK_ROWS * (_aligned(n) + _aligned(k)) for _, n, k in self.sizes)
        return rows + 2 * sum(_aligned(n) for _, n, _ in self.sizes[: self.num_with_vectors])


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


class AdapterLayers:
    """All that adapters add to one rank's model: their memory, and what each token of a step
    uses."""

    def __init__(
        self,
        model: nn.Module,
        names: Names,
        max_adapters: int,
        num_chunks: int,
        max_rank: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._names, self._dtype, self._device = names, dtype, device
        most = num_chunks if max_rank is None else -(-max_rank // CHUNK_ROWS)
        self._max_chunks = most = min(most, num_chunks)
        self.tokens: AdapterTokens | None = None
        """Of the step that runs; None: no token uses an adapter."""
        self.lines: AdapterTokens | None = None
        """The same of the lines whose logits are wanted."""
        self._saved: dict[str, dict[int, Matrix]] = {}
        """What takes the place of a layer's matrix, by its path and the adapter's slot."""
        self._places: dict[str, _Place] = {}
        self._elsewhere: set[str] = set()
        """Modules of other ranks alone."""
        self._experts_elsewhere: set[str] = set()
        """Paths in front of ".experts." where other ranks have some."""
        self._slots_with_experts: set[int] = set()
        self._slots_with_saved: set[int] = set()
        self._used: Collection[int] | None = None
        """Slots of the step that runs; None: any."""
        self._refused: dict[str, str] = {}
        """Modules that cannot have adapters, and why."""
        layout = _Layout()
        found = list(_adaptable(model, names, layout))
        layout.end_vectors()
        mixtures = [
            _Mixture(path, module, layout)
            for path, module in model.named_modules()
            if isinstance(module, Experts)
        ]
        self._num_slices = count = len(layout.sizes)
        # One row for each slot, so that it takes one copy: chunks, counts, vectors.
        self._states = torch.zeros(
            (max_adapters, most + 2 * count), dtype=torch.int32, device=device
        )
        tables, counts, vectors = self._states.split([most, count, count], dim=1)
        chunks = torch.zeros((num_chunks, layout.chunk_size), dtype=dtype, device=device)
        self.pool = AdapterPool(chunks, tables)
        slices = layout.slices(counts, vectors)
        for one in found:
            own = [slices[index] for index in one.indices]
            is_head = isinstance(one.layer, LMHead)
            is_embedding = isinstance(one.layer, VocabEmbedding)
            adapters = LayerAdapters.of(self.pool, own)
            one.layer.method = AdaptedMethod(one.layer.method, self, one.path, adapters, is_head)
            for (key, name), index in zip(one.modules, one.indices, strict=True):
                num_outputs, num_inputs = one.weighted.checkpoint_shape("weight", key)
                self._places[name] = _Place(
                    one.weighted,
                    one.path,
                    key,
                    index,
                    slices[index],
                    one.weighted.rank_cuts("weight", key),
                    (num_inputs, num_outputs) if is_embedding else (num_outputs, num_inputs),
                    is_embedding,
                    can_be_replaced=is_embedding or is_head,
                )
        if mixtures:
            logger.info(
                "slower: tokens whose adapters have experts: computed a second time, expert by "
                "expert"
            )
        for mixture in mixtures:
            self._places.update(mixture.attach(self, slices))
            self._add_elsewhere(mixture.elsewhere)
        self._refused.update(_refused(model, names))
        for module in model.modules():
            if isinstance(module, FusedLayers):
                module.forget_runs()

    @classmethod
    def of(
        cls, model: AdaptableModel, max_adapters: int, num_chunks: int, max_rank: int | None = None
    ) -> AdapterLayers:
        """Attaches itself to all layers of a loaded model. No adapter has more rows than
        `max_rank`; None: than all chunks have."""
        network = cast(nn.Module, model)
        device = next(network.parameters()).device
        layers = cls(
            network, model.weight_map, max_adapters, num_chunks, max_rank, model.dtype, device
        )
        layers._add_elsewhere(model.elsewhere)
        return layers

    def _add_elsewhere(self, names: AbstractSet[str]) -> None:
        self._elsewhere |= names
        parts = [name.partition(".experts.") for name in names]
        self._experts_elsewhere |= {parent for parent, is_expert, _ in parts if is_expert}

    @property
    def nbytes(self) -> int:
        """Memory of the device."""
        return self.pool.chunks.nbytes + self._states.nbytes

    # --- adapters ---------------------------------------------------------------------------------

    def check(self, weights: Mapping[str, LoraWeights]) -> None:
        """Raises where an adapter does not fit the model, by shapes alone: tensors may be those of
        the meta device."""
        self._matched(weights)

    @torch.inference_mode()
    def prepare(self, weights: Mapping[str, LoraWeights]) -> HostAdapter:
        """This rank's share of an adapter, ready to be placed. `weights` are by the base's modules,
        as its checkpoint names them. May be called on any thread."""
        matched = self._matched(weights)
        saved = {
            place.path: self._matrix(path, place, own.saved["weight"])
            for path, place, own in matched
            if "weight" in own.saved
        }
        pairs = [one for one in matched if one[2].a is not None or "bias" in one[2].saved]
        count = self._num_slices
        state = torch.zeros(2 * count, dtype=torch.int32)
        pieces: list[dict[int, Tensor]] = []
        for path, place, own in pairs:
            one = place.one
            a, b, bias, gains = self._rank_share(place, own)
            self._check_numbers(path, place, a, b, bias, gains)
            num_chunks = -(-len(a) // CHUNK_ROWS)
            state[place.index] = num_chunks
            state[count + place.index] = (HAS_BIAS if bias is not None else 0) | (
                HAS_GAINS if gains is not None else 0
            )
            pieces += [{} for _ in range(num_chunks - len(pieces))]
            for chunk in range(num_chunks):
                rows = slice(chunk * CHUNK_ROWS, (chunk + 1) * CHUNK_ROWS)
                pieces[chunk][one.a_offset] = _filled(a[rows], CHUNK_ROWS, one.a_stride)
                pieces[chunk][one.b_offset] = _filled(b[rows], CHUNK_ROWS, one.b_stride)
            for offset, vector in ((one.bias_offset, bias), (one.gains_offset, gains)):
                if vector is not None:
                    pieces[0][offset] = _filled(vector.unsqueeze(0), 1, one.b_stride)
        if len(pieces) > self._max_chunks:
            rank = max(len(own.a) for *_, own in pairs if own.a is not None)
            raise AdapterError(
                f"The adapter has rank {rank}, "
                f"and there is room for {self._max_chunks * CHUNK_ROWS}; raise max_lora_rank."
            )
        runs = [self._runs(one) for one in pieces]
        held = sum(run.nbytes for chunk in runs for _, run in chunk)
        held += sum(matrix.nbytes for matrix in saved.values())
        # Alike on all ranks, which must all take the same way through a step.
        has_experts = any(_EXPERT_NAME.fullmatch(self._name(path)) for path in weights)
        has_saved = any("weight" in own.saved for own in weights.values())
        return HostAdapter(runs, state, saved, has_experts, has_saved, held)

    def _runs(self, pieces: Mapping[int, Tensor]) -> list[tuple[int, Tensor]]:
        """What follows each other is joined: each run takes one copy."""
        groups: list[tuple[int, list[Tensor]]] = []
        end = -1
        for offset, piece in sorted(pieces.items()):
            if offset != end:
                groups.append((offset, []))
            groups[-1][1].append(piece)
            end = offset + piece.numel()
        runs = []
        for offset, parts in groups:
            size = sum(part.numel() for part in parts)
            joined = torch.empty(size, dtype=self._dtype, pin_memory=self._device.type == "cuda")
            at = 0
            for part in parts:
                joined[at : at + part.numel()] = part.flatten()
                at += part.numel()
            runs.append((offset, joined))
        return runs

    def place(self, slot: int, chunks: Sequence[int], adapter: HostAdapter) -> None:
        """Copies an adapter into chunks that are free, ordered before the next step; the slot is
        its own from then on."""
        assert len(chunks) >= adapter.num_chunks, (
            f"{adapter.num_chunks} chunks are needed, and {len(chunks)} given"
        )
        for chunk, runs in zip(chunks, adapter.runs, strict=False):
            for offset, run in runs:
                target = self.pool.chunks[chunk, offset : offset + len(run)]
                target.copy_(run, non_blocking=True)
        state = torch.zeros(
            self._states.shape[1], dtype=torch.int32, pin_memory=self._states.is_cuda
        )
        state[: adapter.num_chunks] = torch.tensor(chunks[: adapter.num_chunks], dtype=torch.int32)
        state[self._max_chunks :] = adapter.state
        self._states[slot].copy_(state, non_blocking=True)
        self._forget(slot)
        if adapter.has_experts:
            self._slots_with_experts.add(slot)
        if adapter.has_saved:
            self._slots_with_saved.add(slot)
        for path, matrix in adapter.saved.items():
            if isinstance(matrix, DenseMatrix):
                matrix = DenseMatrix(matrix.weight.to(self._device, non_blocking=True))
            self._saved.setdefault(path, {})[slot] = matrix

    def clear(self, slot: int) -> None:
        """The slot has no adapter any more, and adds nothing."""
        self._states[slot].zero_()
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        self._slots_with_experts.discard(slot)
        self._slots_with_saved.discard(slot)
        for path, by_slot in list(self._saved.items()):
            by_slot.pop(slot, None)
            if not by_slot:
                del self._saved[path]

    # --- steps ------------------------------------------------------------------------------------

    def begin_step(
        self,
        slots: Tensor | None,
        line_slots: Tensor | None = None,
        used: Collection[int] | None = None,
    ) -> None:
        """Says which adapters the next forward pass uses: int32 [tokens], -1 for none; None: no
        token uses one. `line_slots` are those of the lines whose logits are wanted, as far as
        `begin_lines` does not say it later. `used` are the same slots, if the host knows them."""
        self._used = used
        self.tokens = None if slots is None else self.tokens_of(slots)
        self.begin_lines(line_slots)

    def begin_lines(self, slots: Tensor | None) -> None:
        """Says which adapters the lines of the next logits use."""
        self.lines = None if slots is None else self.tokens_of(slots)

    def tokens_of(self, slots: Tensor) -> AdapterTokens:
        """Tokens by the slots of their adapters."""
        return dispatch.adapter_tokens(slots, len(self.pool.tables))

    def needs_eager_step(self, used: Collection[int]) -> bool:
        """Whether a step with the adapters of these slots waits to learn which tokens use which, so
        that no graph can hold it: where one has experts or whole weights. Alike on all ranks."""
        return not (self._slots_with_experts | self._slots_with_saved).isdisjoint(used)

    @property
    def slots_with_experts(self) -> set[int]:
        """Those whose adapters have experts, of the step that runs."""
        slots = self._slots_with_experts
        return slots if self._used is None else slots.intersection(self._used)

    def saved(self, path: str) -> Iterator[tuple[int, Matrix]]:
        """What takes the place of the matrix of the layer with this path, by the slots of the step
        that runs."""
        for slot, matrix in self._saved.get(path, {}).items():
            if self._used is None or slot in self._used:
                yield slot, matrix

    # --- what an adapter has, and where it belongs ------------------------------------------------

    def _matched(self, weights: Mapping[str, LoraWeights]) -> list[tuple[str, _Place, LoraWeights]]:
        """What is for each place of this rank."""
        matched: list[tuple[str, _Place, LoraWeights]] = []
        unknown: list[str] = []
        problems: list[str] = []
        for path, own in weights.items():
            name = self._name(path)
            if self._is_elsewhere(name):
                continue
            place = self._places.get(name)
            if place is None:
                why = self._refused.get(name)
                (unknown if why is None else problems).append(path if why is None else why)
                continue
            problem = _problem(place, own)
            if problem is not None:
                problems.append(f"{path} {problem}")
                continue
            matched.append((path, place, own))
        if unknown:
            problems.insert(0, f"the model has no {_listed(unknown)}")
        if problems:
            raise AdapterError(
                f"The adapter does not fit the model: {_listed(problems, '; ')}. Use an adapter "
                "that was trained on this model."
            )
        return matched

    def _is_elsewhere(self, name: str) -> bool:
        """Whether only other ranks have the module. Checkpoints have names of their own for
        experts."""
        if name in self._elsewhere:
            return True
        expert = _EXPERT_NAME.fullmatch(name)
        if expert is None or name in self._places:
            return False
        is_there = int(expert[2]) < self._names.num_experts
        return is_there and expert[1] in self._experts_elsewhere

    def _name(self, path: str) -> str:
        """As our layers name what a checkpoint has under this path."""
        name = self._names.rename(f"{path}.weight").removesuffix(".weight")
        return name.replace(".block_sparse_moe.experts.", ".mlp.experts.")

    def _check_numbers(
        self,
        path: str,
        place: _Place,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        gains: Tensor | None,
    ) -> None:
        """Raises where numbers of a file that are finite become NaN or infinite in the model's
        type, scaled and multiplied with each other: A [rank, inputs] and B [rank, outputs]."""
        # The most that inputs of up to 1 give; of an embedding, one column of A is added.
        rows = a.abs().amax(1) if place.is_embedding else a.abs().sum(1)
        most = torch.finfo(self._dtype).max
        computed = {
            "lora_magnitude_vector, divided by the norms of rows,": gains,
            "lora_A": a,
            "lora_B, scaled": b,
            "lora_B lora_A, scaled": rows @ b.abs(),
            "what is added to the outputs": bias,
        }
        for name, values in computed.items():
            if values is not None and not (values.abs() <= most).all():  # true of no NaN
                raise AdapterError(
                    f"{path}: {name} has numbers beyond {most:.3g}, the largest of "
                    f"{str(self._dtype).removeprefix('torch.')}. The file is damaged, training "
                    "went wrong, or lora_alpha is too large."
                )

    def _matrix(self, path: str, place: _Place, weight: Tensor) -> Matrix:
        """This rank's share of a weight, for a GPU still in host memory."""
        share = place.layer.rank_share("weight", place.shard_key, weight)
        assert isinstance(share, Tensor)
        if self._device.type == "cpu" and self._dtype == torch.float32:
            (packed,) = PackFloats().pack([share])
            return packed
        share = share.to(self._dtype)
        if not torch.isfinite(share).all():
            raise AdapterError(
                f"{path}: the saved weight has numbers that are too large for "
                f"{str(self._dtype).removeprefix('torch.')}; set another dtype, or merge the "
                "adapter."
            )
        return DenseMatrix(share.pin_memory() if self._device.type == "cuda" else share)

    def _rank_share(
        self, place: _Place, own: LoraWeights
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """A [rank, inputs], B [rank, outputs], what is added to the outputs, and gains, in
        float32."""
        num_outputs, num_inputs = place.shape
        rows = torch.zeros(1, num_inputs) if own.a is None else own.a
        columns = torch.zeros(num_outputs, 1) if own.b is None else own.b
        a = place.cut_a(rows.float())
        b = place.cut_outputs(columns.float()) * own.scaling
        bias = self._added(place, own)
        gains = None
        if own.magnitude is not None:
            norms = _row_norms(place, a, b, self._device)
            factors = place.cut_outputs(own.magnitude.float().flatten()) / norms
            factors = torch.where(norms > 0, factors, 1.0)  # padding
            b = b * factors.unsqueeze(1)
            gains = factors - 1
        return a, b.t(), bias, gains

    def _added(self, place: _Place, own: LoraWeights) -> Tensor | None:
        """What this rank adds to the outputs of every token."""
        added = None if own.bias is None else place.cut_outputs(own.bias.float()) * own.scaling
        replaced = own.saved.get("bias")
        if replaced is not None:
            one = place.one
            base = place.layer.get_parameter("bias")[one.first : one.first + one.num_outputs]
            change = place.cut_outputs(replaced.float()) - base.float().cpu()
            added = change if added is None else added + change
        return added if place.adds_bias else None


class AdaptableModel(Protocol):
    """A loaded model."""

    @property
    def elsewhere(self) -> frozenset[str]:
        """Modules that other ranks alone have."""
        ...

    @property
    def weight_map(self) -> Names: ...

    @property
    def dtype(self) -> torch.dtype: ...


class AdaptedMethod:
    """The method of a layer, and what adapters add to its results."""

    def __init__(
        self,
        inner: QuantizationMethod,
        owner: AdapterLayers,
        path: str,
        adapters: LayerAdapters,
        is_head: bool,
    ) -> None:
        self._inner, self._owner, self._path = inner, owner, path
        self.adapters, self._is_head = adapters, is_head

    @property
    def tokens(self) -> AdapterTokens | None:
        """What the tokens of this call use; None: none of them uses an adapter."""
        return self._owner.lines if self._is_head else self._owner.tokens

    @property
    def reads_blocks(self) -> bool:
        return self._inner.reads_blocks

    def extra_bytes(self, layer: MatrixLayer, shard_key: ShardKey, stored: str | None) -> int:
        return self._inner.extra_bytes(layer, shard_key, stored)

    def create_weights(self, layer: MatrixLayer, outputs: Axis, inputs: Axis, build: Build) -> None:
        self._inner.create_weights(layer, outputs, inputs, build)

    def finish_loading(self, layer: MatrixLayer) -> None:
        self._inner.finish_loading(layer)

    def apply(
        self, layer: MatrixLayer, x: Tensor, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        result = self._inner.apply(layer, x, bias, out)
        tokens = self.tokens
        if tokens is not None:
            for slot, matrix in self._owner.saved(self._path):
                chosen = _tokens_of(tokens, slot)
                result[chosen] = matrix.multiply(x[chosen], None, None).to(result.dtype)
            dispatch.add_adapters(x, result, bias, self.adapters, tokens)
        return result

    def apply_after_norm(
        self,
        layer: MatrixLayer,
        x: Tensor,
        residual: Tensor | None,
        norm: NormWeight,
        bias: Tensor | None,
        gated: bool,
    ) -> tuple[Tensor, Tensor]:
        tokens = self.tokens
        if tokens is None:
            return self._inner.apply_after_norm(layer, x, residual, norm, bias, gated)
        native = [one for one in layer.matrices if isinstance(one, PackedMatrix)]
        if len(native) == len(layer.matrices) == 1:
            adapters = native_adapters(self.adapters)
            return native[0].multiply_normal(
                x, residual, norm.weight, norm.eps, bias, gated, adapters, tokens
            )
        normal, total = dispatch.rms_norm(x, norm.weight, norm.eps, residual)
        out = self._inner.apply(layer, normal, bias)
        dispatch.add_adapters(normal, out, bias, self.adapters, tokens)
        return dispatch.silu_and_mul(out) if gated else out, total

    def apply_expert(
        self, layer: MatrixLayer, expert: int, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return self._inner.apply_expert(layer, expert, x, bias)

    def rows(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        out = self._inner.rows(layer, ids)
        tokens = self.tokens
        if tokens is not None:
            for slot, matrix in self._owner.saved(self._path):
                chosen = _tokens_of(tokens, slot)
                out[chosen] = matrix.rows(ids[chosen]).to(out.dtype)
            dispatch.add_to_embedding(ids, out, self.adapters, tokens)
        return out


def _tokens_of(tokens: AdapterTokens, slot: int) -> Tensor:
    return (tokens.slots == slot).nonzero().squeeze(1)


@dataclass(frozen=True)
class _Adaptable:
    """A layer that adapters may add to."""

    layer: MatrixLayer
    weighted: MatrixLayer
    """The one that has the weight."""
    path: str
    modules: list[tuple[ShardKey, str]]
    """Of the checkpoint."""
    indices: list[int]
    """Of a slice for each of them."""


def _adaptable(model: nn.Module, names: Names, layout: _Layout) -> Iterator[_Adaptable]:
    for path, layer in model.named_modules():
        if not isinstance(layer, (Linear, VocabEmbedding, LMHead)):
            continue
        weighted = layer.weighted if isinstance(layer, LMHead) else layer
        modules, first = list(names.modules(path).items()), 0
        indices = []
        for key, _ in modules:
            num_outputs, num_inputs = weighted.rank_shape("weight", key)
            if isinstance(layer, VocabEmbedding):
                num_outputs, num_inputs = num_inputs, num_outputs
            indices.append(layout.add(first, num_outputs, num_inputs))
            first += num_outputs
        yield _Adaptable(layer, weighted, path, modules, indices)


class _Mixture:
    """Experts of a layer and their slices."""

    def __init__(self, path: str, experts: Experts, layout: _Layout) -> None:
        self._path, self._experts = path, experts
        self._indices: dict[tuple[int, str], int] = {}
        self.elsewhere: set[str] = set()
        names = [
            (expert, name, self._name(expert, name))
            for expert in range(len(experts.gate_up_proj.experts))
            for name in _EXPERT_PARTS
        ]
        for expert, name, full in names:
            if expert not in experts.kept:
                self.elsewhere.add(full)
                continue
            outputs, inputs = self._shards(name)
            first = outputs.size if name == "up_proj" else 0
            self._indices[expert, name] = layout.add(first, outputs.size, inputs.size)

    def _name(self, expert: int, name: str) -> str:
        return f"{self._path}.{expert}.{name}"

    def _layer(self, name: str) -> ExpertLinear:
        experts = self._experts
        return experts.down_proj if name == "down_proj" else experts.gate_up_proj

    def _shards(self, name: str) -> tuple[Shard, Shard]:
        """What this rank keeps of the outputs and inputs of a part of each expert."""
        _, outputs, (inputs,) = self._layer(name).axes["weight"]
        return outputs[1 if name == "up_proj" else 0], inputs

    def attach(self, owner: AdapterLayers, slices: Sequence[AdapterSlice]) -> dict[str, _Place]:
        """Where adapters of the experts belong, by module."""
        places = {}
        for (expert, name), index in self._indices.items():
            outputs, inputs = self._shards(name)
            cut = Cut(
                slice(outputs.start, outputs.start + outputs.kept),
                slice(inputs.start, inputs.start + inputs.kept),
                (outputs.size, inputs.size),
            )
            full = self._name(expert, name)
            shape = outputs.full, inputs.full
            places[full] = _Place(
                self._layer(name), full, (), index, slices[index], [cut], shape, is_expert=True
            )

        def layers(*names: str) -> dict[int, LayerAdapters]:
            return {
                expert: LayerAdapters.of(
                    owner.pool, [slices[self._indices[expert, name]] for name in names]
                )
                for expert, name in self._indices
                if name == names[0]
            }

        if self._indices:
            both = layers("gate_proj", "up_proj"), layers("down_proj")
            self._experts.adapters = ExpertAdapters(owner, *both)
        return places


def _refused(model: nn.Module, names: Names) -> dict[str, str]:
    """Modules that a checkpoint has and adapters cannot add to, with the reason."""
    found = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, WeightedLayer) or isinstance(
            layer, (Linear, VocabEmbedding, LMHead, ExpertLinear)
        ):
            continue
        why = "is no linear layer, and is served as the base has it"
        if isinstance(layer, LatentLinear):
            why = "is multiplied with queries, not with a token's inputs, and takes no adapter"
        elif isinstance(layer, Embedding):
            why = "is a table of positions, which takes no adapter"
        for name in names.modules(path).values():
            found[name] = f"{name} {why}"
    return found


def _problem(place: _Place, own: LoraWeights) -> str | None:
    """Why what an adapter has for a module does not fit its place."""
    a, b = own.a, own.b
    num_outputs, num_inputs = place.shape
    if a is not None and b is not None:
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != num_inputs or len(b) != num_outputs:
            return (
                f"has lora_A {list(a.shape)} and lora_B {list(b.shape)}, and the model's layer has "
                f"{num_inputs} inputs and {num_outputs} outputs"
            )
        if a.shape[0] != b.shape[1]:
            return f"has lora_A of rank {a.shape[0]} and lora_B of rank {b.shape[1]}"
    elif a is not None or b is not None:
        return "lacks lora_A or lora_B"
    vectors = {
        "bias": own.bias,
        "lora_magnitude_vector": own.magnitude,
        "a bias of its own": own.saved.get("bias"),
    }
    for name, vector in vectors.items():
        if vector is not None and vector.numel() != num_outputs:
            return f"has {name} {list(vector.shape)} for {num_outputs} outputs"
    if place.is_embedding and (own.magnitude is not None or own.bias is not None):
        return "is an embedding with DoRA or a bias, which is not supported: merge the adapter"
    if place.is_expert and (own.magnitude is not None or own.bias is not None):
        return "is an expert with DoRA or a bias, which is not supported: merge the adapter"
    if own.magnitude is not None and not place.has_all_inputs:
        return (
            "has DoRA, whose norms need all inputs of the weight, and ranks divide them: use "
            "tensor_parallel_size=1, or merge the adapter"
        )
    if "bias" in own.saved and getattr(place.layer, "bias", None) is None:
        return "has a bias in place of the base's, which has none"
    weight = own.saved.get("weight")
    if weight is None:
        return None
    if not place.can_be_replaced:
        return "is to be replaced (modules_to_save), which embeddings and the output head alone can"
    shape = place.layer.checkpoint_shape("weight", place.shard_key)
    if tuple(weight.shape) != shape:
        return f"is saved as {list(weight.shape)}, and the model's is {list(shape)}"
    return None


def _listed(names: Sequence[str], between: str = ", ") -> str:
    more = len(names) - MAX_NAMED
    return between.join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _filled(values: Tensor, num_rows: int, width: int) -> Tensor:
    """With zeros up to so many rows and columns."""
    out = values.new_zeros(num_rows, width)
    out[: values.shape[0], : values.shape[1]] = values
    return out


def _row_norms(place: _Place, a: Tensor, b: Tensor, device: torch.device) -> Tensor:
    """Norms of the rows of W + B A, for this rank's outputs."""
    parts = []
    for first in range(0, place.one.num_outputs, ROWS_AT_ONCE):
        end = min(first + ROWS_AT_ONCE, place.one.num_outputs)
        rows = torch.arange(place.one.first + first, place.one.first + end, device=device)
        weight = weight_rows(place.layer, rows).float().cpu()
        parts.append(torch.linalg.vector_norm(weight + b[first:end] @ a, dim=1))
    return torch.cat(parts)


def weight_rows(layer: MatrixLayer, rows: Tensor) -> Tensor:
    """Adjacent rows of a layer's matrix as floats, in whatever format it is kept."""
    if not layer.matrices:
        return layer.get_parameter("weight")[rows]
    parts, first, end, at = [], int(rows[0]), int(rows[-1]) + 1, 0
    for matrix in layer.matrices:
        low, high = max(first - at, 0), min(end - at, matrix.num_outputs)
        if low < high:
            parts.append(matrix.rows(torch.arange(low, high, device=rows.device)).float())
        at += matrix.num_outputs
    return torch.cat(parts)
