/* SPDX-FileCopyrightText: The Crumb authors
 * SPDX-License-Identifier: Apache-2.0
 *
 * One device pool of crumbd: its slots and pages, the sessions and engines of the processes that
 * use them, their leases, and the end of all of these. README.md describes what each step stands
 * for. An `atomic` block is one critical section of one lock in the code; whatever lies between two
 * blocks is a place where another thread can run or a process can die.
 */

#ifndef PROCESSES
#define PROCESSES 2 /* worker processes, each an engine of its own */
#endif
#ifndef SESSIONS_EACH
#define SESSIONS_EACH 1 /* connections that a process opens one after another */
#endif
#ifndef LANES_EACH
#define LANES_EACH 1 /* calls of one process that crumbd serves at the same time */
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef RESERVES_0
#define RESERVES_0 1 /* Reserve calls of process 0 */
#endif
#ifndef RESERVES_1
#define RESERVES_1 1
#endif
#ifndef ACQUIRES_0
#define ACQUIRES_0 0 /* Acquire calls of process 0 */
#endif
#ifndef ACQUIRES_1
#define ACQUIRES_1 0
#endif
#ifndef GIVE_UPS
#define GIVE_UPS 0 /* set of lanes on which a process stops waiting for an answer */
#endif
#ifndef BREAKS
#define BREAKS 0 /* set of sessions whose connection may break while their process lives */
#endif
#ifndef DELETES
#define DELETES 0 /* pages that Delete takes out of the index */
#endif

#define RESERVES(w) (w == 0 -> RESERVES_0 : RESERVES_1)
#define ACQUIRES(w) (w == 0 -> ACQUIRES_0 : ACQUIRES_1)
#define SESSIONS (PROCESSES * SESSIONS_EACH)
#define LANES (PROCESSES * LANES_EACH)
#define LEASES LANES /* a lane has at most one lease */
#define BIT(i) (1 << (i))
#define OWNER(c) ((c) / SESSIONS_EACH)
#define NONE 255

/* ---- What the processes do and know. ---- */

mtype:life = { RUNS, RESTS, DYING, DEAD }; /* DYING: killed, its pidfd is not readable, its GPU may write */
mtype:life process_state[PROCESSES];
byte session_of[PROCESSES]; /* the session that it uses now */
byte blank[SESSIONS];       /* slots that it may write, by the session that reserved them */
byte own[SESSIONS];         /* slots that it committed and reads in place */
byte reading[LANES];        /* slot that it reads under a lease, NONE: no lease */
byte copying[SESSIONS];     /* slots that crumbd asked it to copy to host memory */
byte number[SESSIONS];      /* number of its next Reserve: repeated until an answer arrives */
byte reserves[PROCESSES], acquires[PROCESSES];
byte doubt[PROCESSES];      /* number of the Reserve that it has to repeat */
bool unsettled[PROCESSES];  /* crumbd has not heard what is used of a session that broke */

/* ---- Calls under way: one lane is one call until it ends in crumbd. ---- */

mtype:call = { IDLE, RESERVE, COMMIT, RELEASE, RELEASE_ALL_BUT, DEMOTED, ACQUIRE, RELEASE_LEASE };
mtype:call call[LANES];
byte call_session[LANES], call_slot[LANES], call_number[LANES];
bool given_up[LANES]; /* the process no longer waits for the answer */

/* ---- SessionTable and Engine. ---- */

mtype:phase = { CLOSED, OPEN, DISCONNECTED, ENDED };
mtype:phase phase[SESSIONS];
bool engine_ended[PROCESSES];
bool engine_lease[LANES]; /* Engine::leases_ */

/* ---- DevicePools. ---- */

bool pool_there = true;
byte members, sealed, leaving, wants_leave; /* sets of sessions */
byte last_request[SESSIONS], last_slot[SESSIONS]; /* Member: the last Reserve and its answer */
bool under_way[SESSIONS]; /* Member: a Reserve is being served */

/* ---- DeviceTier, DevicePoolIndex, UniformSlots, PageTable: a page is one fragment in one slot. */

bool taken[SLOTS], page[SLOTS], resident[SLOTS];
byte references[SLOTS];
byte holders[SLOTS];  /* set of sessions */
byte demoting[SLOTS]; /* session + 1; 0: none */
byte tier_lease[LANES]; /* slot + 1; 0: no lease */
byte deletes;

/* ---- Properties that are checked wherever a process begins to use a slot. ---- */

byte i_;
/* No process uses a slot that becomes free, and none reads under a lease that ends. */
byte j_;
inline AssertUnused(s) {
  j_ = 0;
  do
  :: j_ < SESSIONS -> assert(!((blank[j_] | own[j_]) & BIT(s))); j_++
  :: else -> break
  od;
  j_ = 0;
  do
  :: j_ < LANES -> assert(reading[j_] != s); j_++
  :: else -> break
  od;
  j_ = 0
}

/* Another process does not write the slot. */
inline AssertReadable(s) {
  assert(page[s]);
  i_ = 0;
  do
  :: i_ < SESSIONS -> assert(!(blank[i_] & BIT(s))); i_++
  :: else -> break
  od;
  i_ = 0
}

inline AssertAlone(w, s, what) {
  i_ = 0;
  do
  :: i_ < SESSIONS ->
    assert(OWNER(i_) == w || !(blank[i_] & BIT(s)));             /* no slot has two holders */
    assert(OWNER(i_) == w || what == COMMIT || !(own[i_] & BIT(s))); /* nor is a held page written */
    i_++
  :: else -> break
  od;
  i_ = 0;
  do
  :: i_ < LANES ->
    /* A leased page is never overwritten, not even by the process that leased it. */
    assert(what == COMMIT || reading[i_] != s);
    i_++
  :: else -> break
  od;
  i_ = 0
}

/* ---- The index, under DeviceState::mutex. ---- */

inline FreeSlot(s) {
  assert(taken[s]);
  AssertUnused(s);
  taken[s] = false; page[s] = false; resident[s] = false
}

inline Unref(s) { /* PageTable::Unref, by way of DeviceState::TableOf */
  assert(pool_there); /* else crumbd follows the end of a map: SIGSEGV */
  assert(page[s] && references[s] > 0);
  references[s]--;
  if
  :: references[s] == 0 && !resident[s] -> FreeSlot(s)
  :: else
  fi
}

inline LetGo(c, s) { /* DevicePoolIndex::Release */
  if
  :: pool_there && (holders[s] & BIT(c)) ->
    holders[s] = holders[s] & ~BIT(c);
    if
    :: page[s] -> Unref(s)
    :: else -> FreeSlot(s)
    fi
  :: else
  fi
}

inline LetGoAllBut(c, kept) { /* DeviceSlots::ReleaseAllBut */
  i_ = 0;
  do
  :: i_ < SLOTS ->
    if
    :: !(kept & BIT(i_)) -> LetGo(c, i_)
    :: else
    fi;
    i_++
  :: else -> break
  od;
  i_ = 0
}

inline EndDeparture(s) { /* PoolDepartures::End with Departed::kGone */
#ifdef FAULT_EVICTED_UNDER_LEASE
  resident[s] = false;
  if
  :: references[s] > 0 -> references[s] = 0; holders[s] = 0; FreeSlot(s)
  :: else
  fi
#else
  if
  :: references[s] == 1 -> resident[s] = false
  :: else
  fi;
  Unref(s)
#endif
}

inline EndDemotions(c) { /* DevicePoolIndex::DropDemotions */
  i_ = 0;
  do
  :: i_ < SLOTS ->
    if
    :: demoting[i_] == c + 1 -> demoting[i_] = 0; EndDeparture(i_)
    :: else
    fi;
    i_++
  :: else -> break
  od;
  i_ = 0
}

inline TakeBlank(c, s) { /* DevicePoolIndex::TakeBlank; s == NONE: there is no free slot */
  s = NONE; i_ = 0;
  do
  :: i_ < SLOTS && (taken[i_] || !pool_there) -> i_++
  :: i_ < SLOTS && !taken[i_] && pool_there ->
    s = i_; taken[s] = true; holders[s] = BIT(c); break
  :: else -> break
  od;
  i_ = 0
}

/* Whether the session takes part in the pool and may be given slots. */
#define MEMBER(c) (pool_there && (members & BIT(c)) && !(sealed & BIT(c)))

/* Whether a numbered Reserve of the session may be served: one at a time. */
#ifdef FAULT_REPEATED_BESIDE_ITSELF
#define MAY_ASK(c) (MEMBER(c) && phase[c] == OPEN)
#else
#define MAY_ASK(c) (MEMBER(c) && phase[c] == OPEN && !under_way[c])
#endif
/* Whose answer is kept for a repetition. */
#ifdef FAULT_RESPONSE_OF_ANOTHER
#define MEMO(c) 0
#else
#define MEMO(c) (c)
#endif

/* Whether the session holds a slot: DeviceSlots::HeldBy. */
#define HOLDS_1(c, s) ((s) < SLOTS && (holders[(s) % SLOTS] & BIT(c)))
#define HOLDS(c) (pool_there && (HOLDS_1(c, 0) || HOLDS_1(c, 1) || HOLDS_1(c, 2)))

/* Whether the pool can be removed: DeviceSlots::TakePool. */
#ifdef FAULT_POOL_REMOVED_UNDER_ACQUIRE
/* The references of resident pages and the leases count. A page that was deleted while an Acquire
 * that waits for the SSD refers to it is neither. */
#define USED_1(s) ((s) < SLOTS && (holders[(s) % SLOTS] != 0 || \
                                   (resident[(s) % SLOTS] && references[(s) % SLOTS] > 0)))
#define LEASED_1(l) ((l) < LEASES && tier_lease[(l) % LEASES] != 0)
#define POOL_USED \
  (USED_1(0) || USED_1(1) || USED_1(2) || LEASED_1(0) || LEASED_1(1) || LEASED_1(2) || LEASED_1(3))
#else
#define USED_1(s) ((s) < SLOTS && (holders[(s) % SLOTS] != 0 || references[(s) % SLOTS] > 0))
#define POOL_USED (USED_1(0) || USED_1(1) || USED_1(2))
#endif

/* ---- Sessions. ---- */

/* Whether one of the process's engine's leases is there: Engine::leases. */
#define LEASE_1(w, l) ((l) < LEASES && (l) / LANES_EACH == (w) && engine_lease[(l) % LEASES])
#define ENGINE_HAS_LEASES(w) (LEASE_1(w, 0) || LEASE_1(w, 1) || LEASE_1(w, 2) || LEASE_1(w, 3))
#define IN_ENGINE(c, w) \
  ((c) < SESSIONS && OWNER(c) == (w) && phase[(c) % SESSIONS] != CLOSED && \
   phase[(c) % SESSIONS] != ENDED)
#define ENGINE_HAS_SESSIONS(w) \
  (IN_ENGINE(0, w) || IN_ENGINE(1, w) || IN_ENGINE(2, w) || IN_ENGINE(3, w))

/* SessionTable::RemoveLocked. `ends` gets the set of leases that the caller must end. */
inline RemoveSession(c, ends) {
  phase[c] = ENDED;
  if
  :: ENGINE_HAS_SESSIONS(OWNER(c))
  :: else ->
    engine_ended[OWNER(c)] = true;
    i_ = 0;
    do
    :: i_ < LEASES ->
      if
      :: i_ / LANES_EACH == OWNER(c) && engine_lease[i_] ->
        engine_lease[i_] = false; ends = ends | BIT(i_)
      :: else
      fi;
      i_++
    :: else -> break
    od;
    i_ = 0
  fi
}

inline EndLease(l) { /* LeaseTable::Release */
  assert(reading[l] == NONE); /* a process that lives reads there still */
  if
  :: tier_lease[l] != 0 -> Unref(tier_lease[l] - 1); tier_lease[l] = 0
  :: else
  fi
}

/* DevicePools::ProcessEnded and SessionTable::Release. */
inline SessionEnded(c, ends) {
  atomic { members = members & ~BIT(c); leaving = leaving & ~BIT(c); sealed = sealed & ~BIT(c) }
#ifdef DEMOTIONS
  atomic { EndDemotions(c) }
#endif
  atomic { LetGoAllBut(c, 0) }
  do
  :: atomic { ends != 0 ->
       if
       :: ends & 1 -> EndLease(0); ends = ends & ~1
       :: else ->
         if
         :: ends & 2 -> EndLease(1); ends = ends & ~2
         :: else ->
           if
           :: ends & 4 -> EndLease(2); ends = ends & ~4
           :: else -> EndLease(3); ends = ends & ~8
           fi
         fi
       fi
     }
  :: else -> break
  od
}

#ifdef FAULT_LEASES_READ_BEFORE_LOCK
#define MAY_SETTLE(w) true
#else
#define MAY_SETTLE(w) !ENGINE_HAS_LEASES(w)
#endif

/* SessionTable::Settle: ends a disconnected session that holds nothing. */
inline Settle(c, ends) {
#ifdef FAULT_LEASES_READ_BEFORE_LOCK
  atomic { !ENGINE_HAS_LEASES(OWNER(c)) || ENGINE_HAS_LEASES(OWNER(c)) -> ends = NONE;
    if
    :: !ENGINE_HAS_LEASES(OWNER(c)) -> ends = 0
    :: else
    fi
  }
#endif
  atomic {
    if
    :: ends == 0 && phase[c] == DISCONNECTED && !HOLDS(c) && MAY_SETTLE(OWNER(c)) ->
      RemoveSession(c, ends)
    :: else -> goto settled
    fi
  }
  SessionEnded(c, ends);
settled:
  ends = 0
}

/* ---- A call in crumbd: a thread of gRPC. ---- */

/* A call that began while its session was open may end after that. */
#if defined(FAULT_GRANT_TO_DISCONNECTED) || defined(FAULT_LATE_ACQUIRE)
#define MAY_GRANT(c) true
#else
#define MAY_GRANT(c) (phase[c] == OPEN)
#endif

/* The call ends: its last step, so that the lane is idle from here on. */
inline Finish() {
  call[l] = IDLE; call_session[l] = 0; call_slot[l] = 0; call_number[l] = 0; given_up[l] = false;
  c = 0; s = NONE; demoter = 0; ends = 0
}

/* The first page, in slot order, that an eviction policy could choose; it is referred to. */
inline BeginDeparture(s) {
  if
  :: resident[0] && references[0] == 0 -> s = 0
#if SLOTS > 1
  :: resident[1] && references[1] == 0 -> s = 1
#endif
  :: else -> s = NONE
  fi;
  if
  :: s != NONE -> references[s]++
  :: else
  fi
}

/* DevicePools::ChooseDemoter: session + 1 of a member that can be asked; 0: there is none. */
#define CAN_COPY(c) ((members & BIT(c)) && !(leaving & BIT(c)) && phase[c] == OPEN)
inline ChooseDemoter(chosen) {
  if
  :: CAN_COPY(0) -> chosen = 1
#if SESSIONS > 1
  :: !CAN_COPY(0) && CAN_COPY(1) -> chosen = 2
#endif
  :: else -> chosen = 0
  fi
}

proctype Lane(byte l) {
  byte c, s = NONE, demoter, ends;

end:
  atomic {
    call[l] != IDLE -> c = call_session[l];
    if
    :: call[l] == RESERVE -> goto reserve
    :: call[l] == COMMIT -> goto commit
    :: call[l] == RELEASE -> goto release
    :: call[l] == RELEASE_ALL_BUT -> goto release_all_but
    :: call[l] == DEMOTED -> goto demoted
    :: call[l] == ACQUIRE -> goto acquire
    :: call[l] == RELEASE_LEASE -> goto release_lease
    fi
  }

reserve: /* ReserveSlots, DevicePools::Reserve */
  atomic {
    if
    :: MAY_ASK(c) && last_request[MEMO(c)] == call_number[l] ->
      s = last_slot[MEMO(c)]; goto reserved
    :: MAY_ASK(c) && last_request[MEMO(c)] < call_number[l] -> under_way[c] = true
    :: else -> Finish(); goto end
    fi
  }
  atomic { /* DeviceSlots::Reserve: a free slot, else a page that has to leave */
    TakeBlank(c, s);
    if
    :: s != NONE -> goto granted
    :: s == NONE && pool_there -> BeginDeparture(call_slot[l])
    :: else -> call_slot[l] = NONE
    fi;
    if
    :: call_slot[l] == NONE -> goto granted
    :: else
    fi
  }
  if
  :: atomic { true -> /* a lower tier has the page */
       if
       :: pool_there -> EndDeparture(call_slot[l])
       :: else
       fi;
       TakeBlank(c, s); goto granted
     }
#ifdef DEMOTIONS
  :: atomic { true -> ChooseDemoter(demoter) } /* DeviceSlots::Demote */
    atomic { /* BeginDemotions */
      if
      :: pool_there && demoter != 0 -> demoting[call_slot[l]] = demoter
      :: else
      fi
    }
    atomic { /* the request to the demoter */
      if
      :: demoter != 0 && CAN_COPY(demoter - 1) ->
        copying[demoter - 1] = copying[demoter - 1] | BIT(call_slot[l]);
        call_slot[l] = NONE
      :: else
      fi
    }
    atomic { /* Nobody copies the page: it is lost. If its demoter has ended, so has the departure. */
      if
      :: pool_there && call_slot[l] != NONE && demoter == 0 -> EndDeparture(call_slot[l])
      :: pool_there && call_slot[l] != NONE && demoter != 0 && demoting[call_slot[l]] == demoter ->
        demoting[call_slot[l]] = 0; EndDeparture(call_slot[l])
      :: else
      fi
    }
    atomic { TakeBlank(c, s) }
#endif
  fi;
granted:
  atomic { /* the second half of DevicePools::Reserve; it may have got no slot */
    under_way[c] = false;
    if
#ifndef FAULT_LATE_RESERVE
    :: !(MEMBER(c) && MAY_GRANT(c)) -> skip
#endif
    :: else -> last_request[MEMO(c)] = call_number[l]; last_slot[MEMO(c)] = s; goto reserved
    fi
  }
  atomic {
    if
    :: s != NONE -> LetGo(c, s)
    :: else
    fi;
    goto settle
  }
reserved:
  atomic { /* the answer; the process wants none over a session that it has given up */
    if
    :: !given_up[l] && process_state[OWNER(c)] == RUNS && c == session_of[OWNER(c)] ->
      number[c] = number[c] + 1;
      if
      :: s != NONE -> AssertAlone(OWNER(c), s, RESERVE); blank[c] = blank[c] | BIT(s)
      :: else
      fi
    :: else
    fi;
    Finish(); goto end
  }

commit: /* CommitSlots, DeviceSlots::Commit */
  atomic {
    s = call_slot[l];
    if
    :: MEMBER(c) && (holders[s] & BIT(c)) && !page[s] ->
      AssertAlone(OWNER(c), s, COMMIT);
      page[s] = true; resident[s] = true; references[s] = 1
    :: else
    fi;
    Finish(); goto end
  }

release: /* ReleaseSlots, DeviceSlots::Release */
  atomic { LetGo(c, call_slot[l]); goto settle }

release_all_but: /* DevicePools::ReleaseAllBut; call_slot is the set of slots that stay */
#ifndef FAULT_NOT_SEALED
  atomic {
    sealed = sealed | (members & BIT(c)); leaving = leaving | (members & BIT(c));
    last_request[c] = 0; last_slot[c] = NONE
  }
#endif
#ifdef DEMOTIONS
  atomic { EndDemotions(c) }
#endif
  atomic { LetGoAllBut(c, call_slot[l]); unsettled[OWNER(c)] = false; goto settle }

demoted: /* ReleaseSlots, DeviceSlots::Demoted */
  atomic {
    s = call_slot[l];
    if
    :: pool_there && demoting[s] == c + 1 -> demoting[s] = 0; EndDeparture(s)
    :: else
    fi;
    goto settle
  }

acquire: /* Acquire, ThreeTierStore::Acquire */
  atomic { /* Engine::TakeBudget */
    if
    :: phase[c] == OPEN && !engine_ended[OWNER(c)] -> skip
    :: else -> Finish(); goto end
    fi
  }
  atomic { /* DeviceTier::Ref */
    if
    :: pool_there && resident[0] -> s = 0
#if SLOTS > 1
    :: pool_there && resident[1] -> s = 1
#endif
    :: else -> Finish(); goto end
    fi;
    references[s]++
  }
  /* Here it waits for pages that only the SSD has. */
  if
  :: atomic { Unref(s); Finish(); goto end } /* the prefix ends before this page */
  :: atomic { assert(pool_there && page[s]); tier_lease[l] = s + 1 } /* DeviceTier::NameFragments */
  fi;
  atomic { /* Engine::AddLease */
    if
#ifndef FAULT_LATE_ACQUIRE
    :: engine_ended[OWNER(c)] -> goto end_lease
#endif
    :: else -> engine_lease[l] = true
    fi
  }
  atomic {
    if
    :: MAY_GRANT(c) && !given_up[l] -> /* the answer */
      if
      :: process_state[OWNER(c)] == RUNS -> AssertReadable(s); reading[l] = s
      :: else
      fi;
      Finish(); goto end
    :: else /* the session is closed, or the caller gave the request up */
    fi
  }
release_lease: /* SessionTable::Release */
#ifdef FAULT_LEASE_RELEASED_TWICE
  /* The engine's record is looked up in one critical section and erased in another. */
  atomic {
    if
    :: engine_lease[l] -> s = tier_lease[l]
    :: else -> goto settle
    fi
  }
  atomic {
    if
    :: s != 0 -> Unref(s - 1); tier_lease[l] = 0
    :: else
    fi
  }
  atomic { engine_lease[l] = false; goto settle }
#else
  atomic { /* Engine::RemoveLease */
    if
    :: engine_lease[l] -> engine_lease[l] = false
    :: else -> goto settle /* the engine has ended, and the lease with it */
    fi
  }
#endif
end_lease:
  atomic { EndLease(l); goto settle }

settle: /* SessionTable::Settle, then the answer, which carries nothing to keep */
  Settle(c, ends);
  atomic { Finish(); goto end }
}

/* ---- The thread crumb-sessions: sockets, pidfds, pool messages, and the pools' clock. ---- */

#define DROPS(c) ((leaving & members & BIT(c)) && !HOLDS(c))
inline Drop(c_) {
  members = members & ~BIT(c_); leaving = leaving & ~BIT(c_); sealed = sealed & ~BIT(c_)
}

inline Remove(s) {
  deletes++;
  resident[s] = false;
  if
  :: references[s] == 0 -> FreeSlot(s)
  :: else
  fi
}

#define BROKEN(c) \
  (phase[c] == OPEN && ((BREAKS & BIT(c)) || process_state[OWNER(c)] != RUNS))

proctype SessionsThread() {
  byte c, ends;

end:
  do
  :: atomic { BROKEN(0) -> c = 0 } goto disconnect
  :: atomic { process_state[OWNER(0)] == DEAD && phase[0] != ENDED && phase[0] != CLOSED -> c = 0 }
    goto process_ended
  :: atomic { wants_leave & BIT(0) -> c = 0 } goto leave
#if SESSIONS > 1
  :: atomic { BROKEN(1) -> c = 1 } goto disconnect
  :: atomic { process_state[OWNER(1)] == DEAD && phase[1] != ENDED && phase[1] != CLOSED -> c = 1 }
    goto process_ended
  :: atomic { wants_leave & BIT(1) -> c = 1 } goto leave
#endif
#if SESSIONS > 2
  :: atomic { BROKEN(2) -> c = 2 } goto disconnect
  :: atomic { process_state[OWNER(2)] == DEAD && phase[2] != ENDED && phase[2] != CLOSED -> c = 2 }
    goto process_ended
  :: atomic { wants_leave & BIT(2) -> c = 2 } goto leave
#endif
#if SESSIONS > 3
  :: atomic { BROKEN(3) -> c = 3 } goto disconnect
  :: atomic { process_state[OWNER(3)] == DEAD && phase[3] != ENDED && phase[3] != CLOSED -> c = 3 }
    goto process_ended
  :: atomic { wants_leave & BIT(3) -> c = 3 } goto leave
#endif
  /* DevicePools::DropLeavingLocked. */
  :: atomic { DROPS(0) -> Drop(0) }
#if SESSIONS > 1
  :: atomic { DROPS(1) -> Drop(1) }
#endif
#if SESSIONS > 2
  :: atomic { DROPS(2) -> Drop(2) }
#endif
#if SESSIONS > 3
  :: atomic { DROPS(3) -> Drop(3) }
#endif
  :: atomic { pool_there && members == 0 && !POOL_USED -> /* Check and Reclaim: RemovePool */
       pool_there = false;
       do
       :: c < SLOTS ->
         taken[c] = false; page[c] = false; resident[c] = false; demoting[c] = 0;
         references[c] = 0; holders[c] = 0; c++
       :: else -> break
       od;
       c = 0 }
  /* Delete, or damage that was found: PageTable::Remove. */
  :: atomic { deletes < DELETES && pool_there && resident[0] -> Remove(0) }
#if SLOTS > 1
  :: atomic { deletes < DELETES && pool_there && resident[1] -> Remove(1) }
#endif
#if SLOTS > 2
  :: atomic { deletes < DELETES && pool_there && resident[2] -> Remove(2) }
#endif
  od;

disconnect: /* The socket broke, or crumbd could not send on it. The process lives, or is dying. */
  atomic { phase[c] = DISCONNECTED }
#ifdef DEMOTIONS
  atomic { EndDemotions(c) }
#endif
#ifdef FAULT_FREED_BEFORE_PROCESS_END
  atomic { LetGoAllBut(c, 0) }
#endif
  Settle(c, ends);
  atomic { c = 0; ends = 0; goto end }

process_ended: /* SessionTable::End */
  atomic { ends = 0; RemoveSession(c, ends) }
  SessionEnded(c, ends);
  atomic { c = 0; ends = 0; goto end }

leave: /* DevicePools::Leave */
  atomic { wants_leave = wants_leave & ~BIT(c); leaving = leaving | (members & BIT(c)) }
#ifdef DEMOTIONS
  atomic { EndDemotions(c) }
#endif
  atomic { c = 0; goto end }
}

/* ---- A worker process. Its steps are commands; it dies between any two of them. ---- */

/* One Reserve at a time: DevicePool::reserving_. */
#define WAITS_1(l) (call[l] == RESERVE && !given_up[l] && call_session[l] == session_of[w])
#if LANES_EACH > 1
#define WAITS(w) (WAITS_1(w * LANES_EACH) || WAITS_1(w * LANES_EACH + 1))
#else
#define WAITS(w) WAITS_1(w)
#endif
#define IDLE_1(w, k) ((k) >= LANES_EACH || call[(w * LANES_EACH + (k)) % LANES] == IDLE)
#define QUIET(w) \
  (phase[session_of[w]] == OPEN && doubt[w] != number[session_of[w]] && !unsettled[w] && \
   IDLE_1(w, 0) && IDLE_1(w, 1))
#define RUNNING(w) (process_state[w] == RUNS)
#define LOWEST(set) ((set) & 1 -> 0 : ((set) & 2 -> 1 : 2))

inline Call(l, what, c, s) {
  call[l] = what; call_session[l] = c; call_slot[l] = s; given_up[l] = false
}

proctype Process(byte w) {
  byte c, l;

  do
  :: RUNNING(w) ->
    if
    /* Its stream broke: it opens another session. crumbd may not know yet that the former ended. */
    :: atomic { session_of[w] + 1 < (w + 1) * SESSIONS_EACH &&
                !engine_ended[w] ->
         unsettled[w] = true;
         session_of[w] = session_of[w] + 1;
         phase[session_of[w]] = OPEN; number[session_of[w]] = 1 }
    /* DevicePools::Join. */
    :: atomic { pool_there && phase[session_of[w]] == OPEN && !(members & BIT(session_of[w])) &&
                RESERVES(w) > 0 -> members = members | BIT(session_of[w]) }
    /* Calls, on a lane that is idle. */
    :: atomic { l = w * LANES_EACH;
         do
         :: l < (w + 1) * LANES_EACH && call[l] != IDLE -> l++
         :: else -> break
         od;
         c = session_of[w];
         if
         :: l == (w + 1) * LANES_EACH -> skip
         :: else ->
           if
           :: reserves[w] < RESERVES(w) && (members & BIT(c)) && blank[c] == 0 &&
              !WAITS(w) ->
             Call(l, RESERVE, c, 0); call_number[l] = number[c]; reserves[w] = reserves[w] + 1
           :: blank[c] != 0 -> /* what it wrote is complete */
             Call(l, COMMIT, c, LOWEST(blank[c]));
             own[c] = own[c] | BIT(call_slot[l]); blank[c] = blank[c] & ~BIT(call_slot[l])
           :: blank[c] != 0 ->
             Call(l, RELEASE, c, LOWEST(blank[c])); blank[c] = blank[c] & ~BIT(call_slot[l])
           :: own[c] != 0 ->
             Call(l, RELEASE, c, LOWEST(own[c])); own[c] = own[c] & ~BIT(call_slot[l])
           :: copying[c] != 0 && phase[c] == OPEN ->
             Call(l, DEMOTED, c, LOWEST(copying[c])); copying[c] = copying[c] & ~BIT(call_slot[l])
           :: acquires[w] < ACQUIRES(w) && reading[l] == NONE ->
             Call(l, ACQUIRE, c, 0); acquires[w] = acquires[w] + 1
           :: reading[l] != NONE ->
             reading[l] = NONE; Call(l, RELEASE_LEASE, c, 0)
#if SESSIONS_EACH > 1
           :: unsettled[w] && (members & BIT(c)) -> /* DevicePool::SettleFormer */
             c = w * SESSIONS_EACH; Call(l, RELEASE_ALL_BUT, c, blank[c] | own[c])
           :: own[w * SESSIONS_EACH] != 0 && c != w * SESSIONS_EACH ->
             c = w * SESSIONS_EACH;
             Call(l, RELEASE, c, LOWEST(own[c])); own[c] = own[c] & ~BIT(call_slot[l])
           :: blank[w * SESSIONS_EACH] != 0 && c != w * SESSIONS_EACH ->
             c = w * SESSIONS_EACH;
             Call(l, RELEASE, c, LOWEST(blank[c])); blank[c] = blank[c] & ~BIT(call_slot[l])
#endif
           :: else
           fi
         fi;
         c = 0; l = 0 }
    /* The answer is late: the process goes on without it, and repeats a Reserve. */
    :: atomic { (GIVE_UPS & BIT(w * LANES_EACH)) &&
                (call[w * LANES_EACH] == RESERVE || call[w * LANES_EACH] == ACQUIRE) &&
                !given_up[w * LANES_EACH] ->
         given_up[w * LANES_EACH] = true;
         if
         :: call[w * LANES_EACH] == RESERVE -> doubt[w] = number[session_of[w]]
         :: else
         fi }
    :: atomic { (members & BIT(session_of[w])) && phase[session_of[w]] == OPEN &&
                !(leaving & BIT(session_of[w])) -> wants_leave = wants_leave | BIT(session_of[w]) }
#ifdef RESTS_ALIVE
    /* It has all its answers, and from here on does nothing. */
    :: atomic { QUIET(w) -> process_state[w] = RESTS; c = 0; l = 0 } goto end_rests
#endif
    /* It ends, by itself or by a signal, whatever it holds and whatever call is under way. */
    :: process_state[w] = DYING; break
    fi
  od;
  /* The kernel has closed its descriptors and stopped its GPU: only now is its pidfd readable. */
  atomic {
    c = w * SESSIONS_EACH;
    do
    :: c < (w + 1) * SESSIONS_EACH -> blank[c] = 0; own[c] = 0; copying[c] = 0; c++
    :: else -> break
    od;
    l = w * LANES_EACH;
    do
    :: l < (w + 1) * LANES_EACH -> reading[l] = NONE; l++
    :: else -> break
    od;
    unsettled[w] = false; c = 0; l = 0;
    process_state[w] = DEAD; goto end_dead
  }
end_rests:
  false;
end_dead:
  skip
}

/* ---- Everything is given back in the end. ---- */

#define DEAD_1(w) ((w) >= PROCESSES || process_state[(w) % PROCESSES] == DEAD)
#define ALL_DEAD (DEAD_1(0) && DEAD_1(1) && DEAD_1(2))
#define FREE_1(s) ((s) >= SLOTS || (!taken[(s) % SLOTS] && references[(s) % SLOTS] == 0))
#define NO_LEASE_1(l) ((l) >= LEASES || (tier_lease[(l) % LEASES] == 0 && !engine_lease[(l) % LEASES]))
#define ENDED_1(c) \
  ((c) >= SESSIONS || phase[(c) % SESSIONS] == ENDED || phase[(c) % SESSIONS] == CLOSED)
#define ALL_BACK \
  (!pool_there && members == 0 && FREE_1(0) && FREE_1(1) && FREE_1(2) && NO_LEASE_1(0) && \
   NO_LEASE_1(1) && NO_LEASE_1(2) && NO_LEASE_1(3) && ENDED_1(0) && ENDED_1(1) && ENDED_1(2) && \
   ENDED_1(3))

/* What crumbd counts as held by a process that lives is what the process knows that it holds. */
#define HELD_1(c, s) \
  ((c) >= SESSIONS || (s) >= SLOTS || process_state[OWNER((c) % SESSIONS)] != RESTS || \
   !(holders[(s) % SLOTS] & BIT(c)) || ((blank[(c) % SESSIONS] | own[(c) % SESSIONS]) & BIT(s)))
#define LEASE_AGREES(l) \
  ((l) >= LEASES || process_state[(l) % LEASES / LANES_EACH] != RESTS || \
   reading[(l) % LEASES] != NONE || tier_lease[(l) % LEASES] == 0)
#define AGREES(c) \
  (HELD_1(c, 0) && HELD_1(c, 1) && HELD_1(c, 2) && LEASE_AGREES(c) && LEASE_AGREES((c) + 2))

#ifdef LIVENESS
/* Once every process has died, crumbd comes to a state with nothing held, and stays there. */
ltl given_back { (<> ALL_DEAD) -> <> [] ALL_BACK }
/* Time goes on where nothing else happens: weak fairness says something of endless runs only. */
active proctype Time() {
  do
  :: atomic { true -> skip }
  od
}
#else
/* When no step is left, every process is dead and nothing is held. */
active proctype Monitor() {
  atomic { timeout -> assert(!ALL_DEAD || ALL_BACK); assert(AGREES(0) && AGREES(1)) }
}
#endif

init {
  byte k;
  atomic {
    k = 0;
    do
    :: k < PROCESSES ->
      process_state[k] = RUNS; session_of[k] = k * SESSIONS_EACH;
      phase[k * SESSIONS_EACH] = OPEN; number[k * SESSIONS_EACH] = 1; k++
    :: else -> break
    od;
    k = 0;
    do
    :: k < SESSIONS ->
      if
      :: phase[k] != OPEN -> phase[k] = CLOSED
      :: else
      fi;
      last_slot[k] = NONE; k++
    :: else -> break
    od;
    k = 0;
    do
    :: k < LANES -> call[k] = IDLE; reading[k] = NONE; run Lane(k); k++
    :: else -> break
    od;
    run SessionsThread();
    k = 0;
    do
    :: k < PROCESSES -> run Process(k); k++
    :: else -> break
    od
  }
}
