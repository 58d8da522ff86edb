"""OpenAI's HTTP API over `AsyncLLM`. Needs the extra `server`."""
