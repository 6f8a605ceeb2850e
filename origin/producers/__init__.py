"""The worker of kind `text`, and what it serves: embedders and upstream servers."""
