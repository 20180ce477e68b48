"""Which stopping rule ends with the better model? A study that anyone can rerun.

`heldin-lab study quality` trains small models on real tables, logs every run once and replays all
rules on the log. In the order in which a run goes through them: its specification (`spec`) and
data (`data`), training and what is computed beside it (`run`, `witnesses`), the log (`logged`),
what each rule makes of it (`rules`, with those of others in `rivals`), and how the results are put
together (`tables`, `report`). Networks on images and texts (`networks`) have a shorter log
(`along`). `heldin-lab study agreement` compares the sampled criterion with the
exact one.
"""
