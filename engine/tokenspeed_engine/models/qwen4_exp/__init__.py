"""The text model of Qwen3.8-Flash-Next (`qwen4_exp`)."""
