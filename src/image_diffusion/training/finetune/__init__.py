"""Fine-tuning: LoRA and groups of parameters."""
