"""The Anthropic dialect: messages, token counts, models."""
