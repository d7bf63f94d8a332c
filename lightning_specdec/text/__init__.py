"""Text for language models: vocabularies, tokenizers, streams of characters."""
