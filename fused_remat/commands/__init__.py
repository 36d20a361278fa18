"""The commands about memory: one file each, with its options; `subject` finds the model, `finish` ends a run."""
