"""The patch-stack tool behind ``scripts/stack``: one module per job.

Reading order: ``pins`` (what we build on), ``patchfile`` and ``trailers`` (what a
patch is), ``base`` (where the release comes from), ``worktree`` (the applied tree
and its transactions), ``apply``, ``export``, ``lint``, ``verify``, ``prove``,
``suite``.  To another release: ``target`` (what that is), ``landing`` and ``carry``
(how one patch fares there), ``rebase``, ``drift``, ``ledger``; to upstream:
``upstream`` and ``hooks``.  Only ``git`` and ``process`` start processes; only ``cli``
prints.
"""
