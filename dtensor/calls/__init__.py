"""Operator calls on distributed tensors, from torch's dispatcher to kernels on local tensors.

A call goes down this list until something answers it:

* ``dispatch`` looks up its key (``keys``). A kind that was seen is a ``quick`` call: what does the
  same as the operator, and soonest (``fastest``), on local tensors, and the wrapper.
* Everything else is a ``call``, a value. ``special`` ones need no mesh.
* ``binding`` finds its mesh, with numbers of other meshes (``numbers``) and plain tensors beside.
* A decomposition of ours, unless a rule of the user's goes before it.
* A ``local_plan``, made once for the key by ``planning``, as the operator's rule says. That needs
  ``metas``, the global shapes of results; for operators on lists ``list_elements``; for rules of
  the user what ``user_rules`` checks.
* ``fallback``: torch's decomposition, or the operator on gathered tensors, with a warning.
"""
