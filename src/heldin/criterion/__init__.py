"""From moments of gradients to values that say whether to go on."""
