"""Types that every room uses: mesh, spec, graph, plan, precision."""
