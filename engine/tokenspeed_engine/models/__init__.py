"""The model families the engine serves."""
