"""Which stopping rule ends with the better model? A study that anyone can rerun.

`heldin study quality` trains small models on real tables, logs every run once and replays all
rules on the log. What is logged and when (`run`), what each rule makes of it (`rules`, with the
rivals in `rivals`), and how the results are put together (`tables`, `report`) are separate.
`heldin study agreement` compares the sampled criterion with the exact one.
"""
