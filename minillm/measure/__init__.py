"""Measuring: times, memory, the cost model that predicts both, and the style of every plot."""
