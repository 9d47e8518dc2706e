"""The decode-regime calibration report: verdicts first, then every number behind them."""
