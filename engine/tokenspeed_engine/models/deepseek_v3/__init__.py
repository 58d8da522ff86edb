"""DeepSeek-V3 and the models of its architecture, such as Kimi-K2 (`deepseek_v3`)."""
