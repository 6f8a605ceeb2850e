"""The demo model: its corpus, its training and the committed checkpoint in `model/`."""
