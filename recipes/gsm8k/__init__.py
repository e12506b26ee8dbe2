"""GSM8K, prepared and rewarded by verl, as plain samples or as trees that branch at lines."""
