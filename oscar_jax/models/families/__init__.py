"""One file per family of models; `family.all_families` finds them, so that a new file is all it takes."""
