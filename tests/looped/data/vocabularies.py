"""Small real tokenizers, trained here: a byte-level BPE as tokenizer.json and a SentencePiece model."""

import io

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXT = [
    f"The quick brown fox number {i} jumps over {i * i} lazy dogs; φ is {i / 7:.3f}, naïve café.\n"
    for i in range(400)
]


def json_tokenizer(special=("<s>", "</s>"), vocab_size=400) -> bytes:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer.to_str().encode()


def sentencepiece_model(vocab_size=400) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()
