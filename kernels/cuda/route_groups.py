"""Few routes in groups of one expert each, found by every thread block for itself."""

import tilelang.language as T

WARP = 32
WARPS = 8
THREADS = WARPS * WARP
"""At least as many as routes: each thread places one among those of its expert."""
ROUTES = 8
"""Routes of one expert that are multiplied together: the narrow side of the tensor core's tile."""
ID, GROUP, EXPERT, LEADERS, FIELDS = 0, 1, 2, 3, 4
"""Rows of the table of routes: their experts, the groups of those that lead one, the experts of
groups, and how many routes of each warp lead one. In one piece, since the memory of buffers is
shared by how barriers would have been placed."""


@T.macro
def list_groups(ids, num_routes, top_k, num_experts, table, members, groups: T.Ref):
    """List the groups of up to ``ROUTES`` routes of one expert, in the order of their first routes.

    Group g has the routes ``members[g]``, -1 where there are fewer, of expert ``table[EXPERT, g]``.
    ``groups`` is how many there are. ``table[ID]`` has the expert of each route, -1 if it is none.
    """
    thread = T.get_thread_binding()
    route = T.alloc_var(T.int32)
    before = T.alloc_var(T.int32)
    head = T.alloc_var(T.int32)
    ballot = T.alloc_var(T.int32)
    place = T.alloc_var(T.int32)
    route = -1
    if thread < num_routes:
        route = ids[T.truncdiv(thread, top_k), T.truncmod(thread, top_k)]
        route = T.Select(route < num_experts, route, -1)
    table[ID, thread] = route
    for i in T.vectorized(ROUTES):
        members[thread, i] = T.Cast(T.int16, -1)
    T.sync_threads()
    before = 0
    head = thread
    if route >= 0:
        for i in T.serial(thread):
            if table[ID, i] == route:
                head = T.Select(before % ROUTES == 0, i, head)
                before = before + 1
    leads = T.And(route >= 0, before % ROUTES == 0)
    ballot = T.Cast(T.int32, T.ballot(leads))
    if thread % WARP == 0:
        table[LEADERS, thread // WARP] = T.call_extern(T.int32, "__popc", ballot)
    T.sync_threads()
    groups = 0
    place = T.call_extern(T.int32, "__popc", ballot & ((1 << thread % WARP) - 1))
    for w in T.unroll(WARPS):
        place = place + T.Select(w < thread // WARP, table[LEADERS, w], 0)
        groups = groups + table[LEADERS, w]
    if leads:
        table[GROUP, thread] = place
        table[EXPERT, place] = route
    T.sync_threads()
    if route >= 0:
        place = table[GROUP, T.Select(leads, thread, head)]
        members[place, before % ROUTES] = T.Cast(T.int16, thread)
    T.sync_threads()
