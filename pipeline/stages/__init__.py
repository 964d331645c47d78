"""One thin file a stage, in the order of the pipeline."""
