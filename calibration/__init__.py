"""Statistics that quantization needs: prompts, own outputs, Hessians, replay, metrics."""
