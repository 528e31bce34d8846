"""`fleet doctor`: what is wrong with a fleet, the likeliest causes first, each with its remedy.

The operator's machine asks every host two things: its state (onhost/state.py, as every deploy
does) and the doctor's own questions (onhost/doctor.py). All else here is pure: states and
answers in, findings out. Every finding's id is an entry of docs/runbook.md.
"""
