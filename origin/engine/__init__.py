"""The worker of kind `tokens`: its engine, and what happens to each token on its way to a frame."""
