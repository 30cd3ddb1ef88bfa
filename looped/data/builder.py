"""The TFDS data set of packed rows: its plan, and its description as a TFDS builder."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from tensorflow_datasets.core import splits

from looped.data.corpus import SPLITS, Source, Split
from looped.data.metadata import FORMAT_VERSION, PackMetadata
from looped.data.packing import RULE_VERSION, EmptyDocuments, LongDocuments, Packer
from looped.data.shards import DATASET, FORMAT, TEMPLATE, shard_path
from looped.data.tokenizers import Tokenizer, fingerprint_of, token_dtype
from looped.jsonable import to_json


@dataclasses.dataclass(frozen=True)
class PackPlan:
    """Everything that decides the rows.  A document of no tokens is an error, or skipped and counted."""

    source: Source
    tokenizer: Tokenizer
    sequence_length: int
    buffer_size: int = 1000
    long_documents: LongDocuments = "cut"
    empty_documents: EmptyDocuments = "refuse"

    @functools.cached_property
    def decides(self) -> dict:
        """JSON of what decides the rows."""
        return {
            "source": self.source.description(),
            "tokenizer": self.tokenizer.fingerprint,
            "sequence_length": self.sequence_length,
            "buffer_size": self.buffer_size,
            "long_documents": self.long_documents,
            "packing": RULE_VERSION,
            "format": FORMAT_VERSION,
        }

    @functools.cached_property
    def key(self) -> str:
        """Twelve hex digits that change whenever the rows might: equal for equal plans over the same text."""
        return fingerprint_of(self.decides)[:12]

    @property
    def name(self) -> str:
        """Name of the folder that holds the prepared data."""
        tokenizer = re.sub(r"[^A-Za-z0-9_.]+", "-", self.tokenizer.name).strip("-.")[-40:]
        return f"{self.source.name}-{tokenizer}-t{self.sequence_length}-{self.key}"

    def packer(self) -> Packer:
        return Packer(
            self.sequence_length + 1,
            self.tokenizer.bos,
            token_dtype(self.tokenizer.vocab_size),
            self.buffer_size,
            self.long_documents,
        )


class PackedRows(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The rows of a `PackPlan`, in the packer's order, as the feature `tokens` [T + 1].

    `looped.data.pack` writes them shard by shard and has this builder describe them, so that anyone can read the
    result: `tfds.builder_from_directory(folder).as_data_source("train")`.  Prepared by TFDS itself
    (`download_and_prepare`), which can neither go on where it was stopped nor count, it gives the same rows.
    """

    name = DATASET
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First."}  # noqa: RUF012
    # TFDS finds checksums of downloads by it, for which it imports a package that it does not require.
    code_path = None

    def __init__(self, plan: PackPlan, data_dir: epath.PathLike):
        self._plan = plan
        self._metadata = tfds.core.MetadataDict()
        super().__init__(data_dir=data_dir, file_format=FORMAT)

    def _info(self) -> tfds.core.DatasetInfo:
        tokens = tfds.features.Tensor(
            shape=(self._plan.sequence_length + 1,),
            dtype=token_dtype(self._plan.tokenizer.vocab_size),
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
        documents = (self._plan.tokenizer.encode(text) for text in self._plan.source.documents(split))
        for index, row in enumerate(self._plan.packer().rows(documents)):
            yield index, {"tokens": row}

    def describe(self, directory: Path, metadata: PackMetadata, shards: dict[Split, list[int]]) -> None:
        """Writes TFDS's files beside the shards in `directory`: the rows of each shard of a split."""
        infos = []
        for split, rows in shards.items():
            size = sum(shard_path(directory, split, i).stat().st_size for i in range(len(rows)))
            template = tfds.core.ShardedFileTemplate(
                data_dir=epath.Path(directory),
                template=TEMPLATE,
                dataset_name=DATASET,
                split=split,
                filetype_suffix=FORMAT,
            )
            infos.append(
                tfds.core.SplitInfo(
                    name=split, shard_lengths=rows, num_bytes=size, filename_template=template
                )
            )
        self.info.set_splits(splits.SplitDict(infos))
        self._metadata.update(to_json(metadata))
        self.info.write_to_directory(epath.Path(directory))
