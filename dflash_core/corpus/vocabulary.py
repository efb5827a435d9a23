"""A small byte-level BPE vocabulary with a chat template, for targets trained from scratch."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

__all__ = ["CHAT_TEMPLATE", "SPECIAL_TOKENS", "train_vocabulary"]

PAD, START, END, MASK = SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>")

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Source code: a line break takes its indentation along, words split from underscores and digits.
PIECES = r"\n+ *| ?[A-Za-z]+| ?_+|[0-9]| ?[^\sA-Za-z0-9_]+|\s+"


def train_vocabulary(
    texts: Iterable[str], *, vocab_size: int, out: Path, max_length: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on texts and save it as a tokenizer folder.

    Args:
        texts: What the vocabulary should be good at.
        vocab_size: Ids in all, the four special tokens (first) and 256 bytes included.
        out: Folder for tokenizer.json, tokenizer_config.json and the chat template.
        max_length: Context length in tokens, recorded for users of the tokenizer.

    Returns:
        The tokenizer. ``<|mask|>`` is a reserved id that no text encodes to.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        additional_special_tokens=[START],
        model_max_length=max_length,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(out)
    return fast
