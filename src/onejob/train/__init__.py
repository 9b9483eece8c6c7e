"""Stage 2: a dataset becomes a trained checkpoint.

spec.py         the [train] table, and its plan
order.py        which rows make which batch, on which rank
schedule.py     the learning rate of each step
checkpoint.py   what a killed training goes on from
ranks.py        a gang comes together, or says who is missing
engines/        one file an engine
"""
