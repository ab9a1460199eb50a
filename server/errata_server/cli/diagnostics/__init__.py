"""The measurements of ``errata doctor`` on this machine (`probes`) and its conclusions from them (`checks`)."""
