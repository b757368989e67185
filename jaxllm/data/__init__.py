"""Data pipeline: reads text and yields windows of token ids. It uses numpy and the config, but no model and no devices."""
