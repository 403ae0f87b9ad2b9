"""The external scaler: the desired counts of models, for KEDA. Read first: `handlers`."""
