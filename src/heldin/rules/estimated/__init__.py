"""Rules that follow an estimate of the test loss, made from the training rows alone."""
