"""Between text and token ids: chat template and tokenizer in, detokenizer and stop strings out."""
