"""How long are they? Histograms and quantiles of sequence lengths, merged exactly."""
