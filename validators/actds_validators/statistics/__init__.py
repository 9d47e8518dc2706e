"""Estimators of the audit and the studies, over numbers alone: no table and no file.

By step ``(n_steps,)``, in the order of time, are ``n`` computed tokens, ``lost`` ones, and ``run``,
the label of the run. All raise ValueError for shapes that differ, a value that is not finite, an
argument out of its range, a negative count, or more lost than computed.
"""
