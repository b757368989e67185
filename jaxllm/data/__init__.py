"""Text in, windows of token ids out. Knows numpy and the config; no model, no devices."""
