"""The TFDS data set of packed rows: `array_record` shards of uint16 tokens, written without TensorFlow."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from looped.data.corpus import SPLITS, Source, Split
from looped.data.metadata import FORMAT_VERSION, PackMetadata, SplitMetadata, TokenizerMetadata
from looped.data.packing import RULE_VERSION, LongDocuments, Packer
from looped.data.tokenizers import Tokenizer, fingerprint_of, token_dtype
from looped.errors import UserError
from looped.jsonable import to_json


@dataclasses.dataclass(frozen=True)
class PackPlan:
    """Everything that decides the rows."""

    source: Source
    tokenizer: Tokenizer
    sequence_length: int
    buffer_size: int = 1000
    long_documents: LongDocuments = "cut"

    @functools.cached_property
    def key(self) -> str:
        """Twelve hex digits that change whenever the rows might: equal for equal plans over the same text."""
        decides = {
            "source": self.source.description(),
            "tokenizer": self.tokenizer.fingerprint,
            "sequence_length": self.sequence_length,
            "buffer_size": self.buffer_size,
            "long_documents": self.long_documents,
            "packing": RULE_VERSION,
            "format": FORMAT_VERSION,
        }
        return fingerprint_of(decides)[:12]

    @property
    def name(self) -> str:
        """Name of the folder that holds the prepared data."""
        return f"{self.source.name}-{self.tokenizer.name}-t{self.sequence_length}-{self.key}"


class PackedRows(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes the rows of a `PackPlan`, in the packer's order, as the feature `tokens` [T + 1].

    Anyone can read the result: `tfds.builder_from_directory(folder).as_data_source("train")`.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First."}  # noqa: RUF012
    # TFDS finds checksums of downloads by it, for which it imports a package that it does not require.
    code_path = None

    def __init__(self, plan: PackPlan, data_dir: epath.PathLike):
        self._plan = plan
        self._splits: dict[Split, SplitMetadata] = {}
        self._metadata = tfds.core.MetadataDict()
        self._dtype = token_dtype(plan.tokenizer.vocab_size)
        super().__init__(data_dir=data_dir, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        tokens = tfds.features.Tensor(
            shape=(self._plan.sequence_length + 1,),
            dtype=self._dtype,
            encoding=tfds.features.Encoding.BYTES,  # fixed size: rows decode in bulk
        )
        return self.dataset_info_from_configs(
            description="Rows of tokens that each begin with BOS, packed for language-model pretraining.",
            features=tfds.features.FeaturesDict({"tokens": tokens}),
            metadata=self._metadata,
            disable_shuffling=True,  # the loader shuffles; here the same plan gives the same bytes
        )

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split: Split) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        plan = self._plan
        packer = Packer(
            plan.sequence_length + 1, plan.tokenizer.bos, self._dtype, plan.buffer_size, plan.long_documents
        )
        text_hash, rows_hash, text_bytes = hashlib.sha256(), hashlib.sha256(), 0

        def documents() -> Iterator[np.ndarray]:
            nonlocal text_bytes
            for text in plan.source.documents(split):
                data = text.encode()
                text_bytes += len(data)
                text_hash.update(len(data).to_bytes(8, "little") + data)  # the length, so that edges count
                yield plan.tokenizer.encode(text)

        for index, row in enumerate(packer.rows(documents())):
            rows_hash.update(row.data)
            yield index, {"tokens": row}
        if not packer.statistics.rows:
            raise UserError(
                f"sequence_length is {plan.sequence_length}; the {split} text of {plan.source.name!r} has"
                f" {packer.statistics.document_tokens} tokens, not a full row: shorten it or add text."
            )
        self._splits[split] = SplitMetadata(
            text_bytes, text_hash.hexdigest(), rows_hash.hexdigest(), packer.statistics
        )

    def _download_and_prepare(self, dl_manager, download_config) -> None:
        super()._download_and_prepare(dl_manager, download_config)
        self._metadata.update(to_json(self.pack_metadata()))  # TFDS writes it once this returns

    def pack_metadata(self) -> PackMetadata:
        """Describes the data set, once its splits are generated."""
        plan = self._plan
        return PackMetadata(
            key=plan.key,
            source_name=plan.source.name,
            source=plan.source.description(),
            sequence_length=plan.sequence_length,
            buffer_size=plan.buffer_size,
            long_documents=plan.long_documents,
            tokenizer=TokenizerMetadata(
                plan.tokenizer.name,
                plan.tokenizer.fingerprint,
                plan.tokenizer.vocab_size,
                plan.tokenizer.bos,
            ),
            train=self._splits["train"],
            validation=self._splits["validation"],
        )

    def _log_download_bytes(self) -> None:
        """Says nothing: TFDS would print that it downloads."""

    def _log_download_done(self) -> None:
        """Says nothing: `looped.data.loader.prepare` reports."""


def write_packed(plan: PackPlan, directory: epath.Path) -> epath.Path:
    """Writes the data set somewhere under the new folder `directory` and returns its own folder."""
    tfds.disable_progress_bar()
    builder = PackedRows(plan, directory)
    builder.download_and_prepare()
    return epath.Path(builder.data_dir)
