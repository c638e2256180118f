/* SPDX-FileCopyrightText: The Crumb authors
 * SPDX-License-Identifier: Apache-2.0
 *
 * A device pool over restarts of crumbd: workers keep using the memory while crumbd is away, and
 * the next crumbd learns from them which slots are in use. README.md describes what each step
 * stands for. An `atomic` block is a critical section or a call that crumbd serves as a whole;
 * crumbd or a process can die between any two of them.
 */

#ifndef PROCESSES
#define PROCESSES 2
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef CRASHES
#define CRASHES 2 /* of crumbd */
#endif
#ifndef RESERVES
#define RESERVES 1 /* of each process */
#endif
#ifndef ACQUIRES
#define ACQUIRES 1 /* of each process */
#endif

#define BIT(i) (1 << (i))
#define NONE 255

/* ---- A worker process: DevicePool. ---- */

mtype:life = { RUNS, DYING, DEAD };
mtype:life process_state[PROCESSES];
bool knows_pool[PROCESSES];   /* it has joined at least once */
byte session[PROCESSES];      /* number of the crumbd that it has joined; 0: none */
byte listed_for[PROCESSES];   /* number of the crumbd for which it has listed its claims: epoch_ */
byte to_claim[PROCESSES];     /* slots that are listed and not claimed yet */
bool ready[PROCESSES];        /* it has told its mark to that crumbd */
byte writes[PROCESSES];       /* slots that are blank in its hands */
byte reads[PROCESSES];        /* slots whose page it attends, committed or leased */
byte answer_slot[PROCESSES];  /* page that an Acquire has returned and that is not held yet */
byte answer_from[PROCESSES];  /* number of the crumbd that returned it */
byte reserves[PROCESSES], acquires[PROCESSES];

/* ---- The roster: a file whose locks the kernel keeps, whatever becomes of crumbd. ---- */

bool mark[PROCESSES];

/* ---- crumbd: all of it is lost when crumbd dies. ---- */

mtype:slot = { UNKNOWN, FREE, TAKEN };
byte crumbd = 1;      /* number of the crumbd that runs: its epoch */
bool pool_there;
bool recovering;
byte known;           /* processes whose marks it has been told */
mtype:slot slot[SLOTS];
bool page[SLOTS];
byte holders[SLOTS];  /* set of processes, by a hold or by a lease */

byte i_;

/* No slot has two holders, and a page that is read is never overwritten. */
inline AssertAlone(w, s) {
  i_ = 0;
  do
  :: i_ < PROCESSES -> assert(i_ == w || !((writes[i_] | reads[i_]) & BIT(s))); i_++
  :: else -> break
  od;
  assert(!(reads[w] & BIT(s)));
  i_ = 0
}

inline AssertNotWritten(w, s) {
  i_ = 0;
  do
  :: i_ < PROCESSES -> assert(i_ == w || !(writes[i_] & BIT(s))); i_++
  :: else -> break
  od;
  i_ = 0
}

inline LetGo(w, s) {
  if
  :: holders[s] & BIT(w) ->
    holders[s] = holders[s] & ~BIT(w);
    if
    :: holders[s] == 0 && !page[s] ->
#ifdef FAULT_FREED_WHILE_RECOVERING
      slot[s] = FREE
#else
      slot[s] = (recovering -> UNKNOWN : FREE) /* UniformSlots::Free */
#endif
    :: else
    fi
  :: else
  fi
}

inline LetGoAll(w) {
  LetGo(w, 0);
#if SLOTS > 1
  LetGo(w, 1)
#endif
}

inline NewPool(fresh) {
  pool_there = true; slot[0] = fresh;
#if SLOTS > 1
  slot[1] = fresh
#endif
}

inline Claim(w, s) { /* DevicePoolIndex::Claim */
  assert(recovering);
  if
  :: slot[s] != TAKEN -> slot[s] = TAKEN; page[s] = ((reads[w] & BIT(s)) != 0)
  :: slot[s] == TAKEN && (reads[w] & BIT(s)) -> page[s] = true
  :: else
  fi;
  holders[s] = holders[s] | BIT(w);
  to_claim[w] = to_claim[w] & ~BIT(s);
  if
  :: !((writes[w] | reads[w]) & BIT(s)) -> LetGo(w, s) /* it was let go meanwhile: not_needed */
  :: else
  fi
}

/* Every process of the roster has said what it holds. */
#define KNOWN_1(w) ((w) >= PROCESSES || !mark[(w) % PROCESSES] || (known & BIT(w)))
#ifdef FAULT_RECOVERY_ENDS_EARLY
#define ALL_KNOWN (known != 0 || (!mark[0] && !mark[PROCESSES - 1]))
#else
#define ALL_KNOWN (KNOWN_1(0) && KNOWN_1(1) && KNOWN_1(2))
#endif

proctype Crumbd() {
end:
  do
  :: atomic { pool_there && recovering && ALL_KNOWN -> /* DevicePools::SettleRecovery */
       recovering = false;
       if
       :: slot[0] == UNKNOWN -> slot[0] = FREE
       :: else
       fi;
#if SLOTS > 1
       if
       :: slot[1] == UNKNOWN -> slot[1] = FREE
       :: else
       fi
#endif
     }
  :: atomic { pool_there && !recovering && page[0] && holders[0] == 0 -> /* eviction */
       page[0] = false; slot[0] = FREE }
#if SLOTS > 1
  :: atomic { pool_there && !recovering && page[1] && holders[1] == 0 ->
       page[1] = false; slot[1] = FREE }
#endif
  /* The pidfd of a process that has ended is readable: DevicePools::ProcessEnded. */
  :: atomic { process_state[0] == DEAD && session[0] == crumbd -> LetGoAll(0); session[0] = 0 }
#if PROCESSES > 1
  :: atomic { process_state[1] == DEAD && session[1] == crumbd -> LetGoAll(1); session[1] = 0 }
#endif
#if PROCESSES > 2
  :: atomic { process_state[2] == DEAD && session[2] == crumbd -> LetGoAll(2); session[2] = 0 }
#endif
  /* crumbd dies, and another one starts. */
  :: atomic { crumbd <= CRASHES ->
       crumbd++;
       pool_there = false; recovering = false; known = 0; NewPool(UNKNOWN); pool_there = false;
       page[0] = false; holders[0] = 0;
#if SLOTS > 1
       page[1] = false; holders[1] = 0
#endif
     }
  od
}

#define JOINED(w) (session[w] == crumbd && ready[w])

proctype Process(byte w) {
  byte s;

  do
  /* The first time: a new pool, or one that others are in. Its mark is taken before it uses a slot. */
  :: atomic { !knows_pool[w] && !(crumbd > 1 && !pool_there) ->
       if
       :: !pool_there -> NewPool(FREE)
       :: else
       fi;
       knows_pool[w] = true; session[w] = crumbd; listed_for[w] = crumbd }
#ifndef FAULT_NOT_MARKED
    mark[w] = true; /* RosterMark::Take */
#endif
    atomic {
      if
      :: session[w] == crumbd && pool_there -> /* PoolSession::ReportMark */
        known = known | BIT(w); ready[w] = true
      :: else
      fi
    }
  /* Again, after crumbd was away: Join, OfferAll. */
  :: atomic { knows_pool[w] && session[w] != crumbd ->
       if
       :: !pool_there -> NewPool(UNKNOWN); recovering = true
       :: else
       fi;
       session[w] = crumbd; ready[w] = false }
#ifdef FAULT_MARK_SENT_BEFORE_CLAIMS
    atomic {
      if
      :: session[w] == crumbd -> known = known | BIT(w)
      :: else
      fi
    }
#endif
    atomic { /* ClaimAll lists, under DevicePool::mutex_ */
      listed_for[w] = session[w]; to_claim[w] = writes[w] | reads[w]
    }
  /* ClaimSlots, one slot after another; the process may let slots go between. */
  :: atomic { session[w] == crumbd && !ready[w] && to_claim[w] != 0 && listed_for[w] == crumbd ->
       s = (to_claim[w] & 1 -> 0 : 1);
       if
       :: recovering -> Claim(w, s)
       :: else -> to_claim[w] = 0 /* the pool was not made again: crumbd knows what is held */
       fi;
       s = 0 }
  :: atomic { session[w] == crumbd && !ready[w] && to_claim[w] == 0 && listed_for[w] == crumbd -> known = known | BIT(w); ready[w] = true } /* ReportMark */
  /* Reserve: a blank slot, by the session of this crumbd, unless the pool recovers. */
  :: atomic { JOINED(w) && !recovering && reserves[w] < RESERVES && slot[0] == FREE ->
       AssertAlone(w, 0);
       slot[0] = TAKEN; holders[0] = BIT(w); writes[w] = writes[w] | 1; reserves[w] = reserves[w] + 1 }
#if SLOTS > 1
  :: atomic { JOINED(w) && !recovering && reserves[w] < RESERVES && slot[1] == FREE ->
       AssertAlone(w, 1);
       slot[1] = TAKEN; holders[1] = BIT(w); writes[w] = writes[w] | 2; reserves[w] = reserves[w] + 1 }
#endif
#ifdef FAULT_FREED_WHILE_RECOVERING
  :: atomic { JOINED(w) && recovering && reserves[w] < RESERVES && slot[0] == FREE ->
       AssertAlone(w, 0);
       slot[0] = TAKEN; holders[0] = BIT(w); writes[w] = writes[w] | 1; reserves[w] = reserves[w] + 1 }
#endif
  /* Commit: what it wrote becomes a page, if this crumbd gave it the slot. */
  :: atomic { writes[w] != 0 ->
       s = (writes[w] & 1 -> 0 : 1);
       writes[w] = writes[w] & ~BIT(s); reads[w] = reads[w] | BIT(s);
       if
       :: JOINED(w) && slot[s] == TAKEN && holders[s] == BIT(w) -> page[s] = true
       :: else
       fi;
       s = 0 }
  /* Release, over the session of this crumbd; of an earlier one there is nothing to release. */
  :: atomic { (writes[w] | reads[w]) & 1 ->
       writes[w] = writes[w] & ~1; reads[w] = reads[w] & ~1;
       if
       :: session[w] == crumbd && pool_there && !(to_claim[w] & 1) -> LetGo(w, 0)
       :: else
       fi }
#if SLOTS > 1
  :: atomic { (writes[w] | reads[w]) & 2 ->
       writes[w] = writes[w] & ~2; reads[w] = reads[w] & ~2;
       if
       :: session[w] == crumbd && pool_there && !(to_claim[w] & 2) -> LetGo(w, 1)
       :: else
       fi }
#endif
  /* Acquire: crumbd leases a page; the process holds it when the answer has come. */
  :: atomic { JOINED(w) && acquires[w] < ACQUIRES && answer_slot[w] == NONE && page[0] &&
              !(reads[w] & 1) ->
       holders[0] = holders[0] | BIT(w); answer_slot[w] = 0; answer_from[w] = crumbd;
       acquires[w] = acquires[w] + 1 }
#if SLOTS > 1
  :: atomic { JOINED(w) && acquires[w] < ACQUIRES && answer_slot[w] == NONE && page[1] &&
              !(reads[w] & 2) ->
       holders[1] = holders[1] | BIT(w); answer_slot[w] = 1; answer_from[w] = crumbd;
       acquires[w] = acquires[w] + 1 }
#endif
  :: atomic { answer_slot[w] != NONE -> /* DevicePool::Hold, CheckLeased */
       s = answer_slot[w]; answer_slot[w] = NONE;
       if
#ifndef FAULT_LEASE_OF_EARLIER_CRUMBD
       :: answer_from[w] != listed_for[w] ->
         if
         :: answer_from[w] == crumbd && !(reads[w] & BIT(s)) -> LetGo(w, s)
         :: else
         fi
#endif
       :: else -> AssertNotWritten(w, s); reads[w] = reads[w] | BIT(s)
       fi;
       answer_from[w] = 0; s = 0 }
  :: process_state[w] = DYING; break
  od;
  /* Its GPU has stopped; only now are its locks gone and its pidfd readable. */
  atomic {
    process_state[w] = DEAD; mark[w] = false; writes[w] = 0; reads[w] = 0;
    to_claim[w] = 0; answer_slot[w] = NONE; answer_from[w] = 0
  }
}

#define DEAD_1(w) ((w) >= PROCESSES || process_state[(w) % PROCESSES] == DEAD)
#define ALL_DEAD (DEAD_1(0) && DEAD_1(1) && DEAD_1(2))
#define FREE_1(s) ((s) >= SLOTS || !pool_there || (slot[(s) % SLOTS] == FREE && holders[(s) % SLOTS] == 0))
#define ALL_BACK (FREE_1(0) && FREE_1(1))

#ifdef LIVENESS
ltl given_back { (<> ALL_DEAD) -> <> [] ALL_BACK }
/* Time goes on where nothing else happens: weak fairness says something of endless runs only. */
active proctype Time() {
  do
  :: atomic { true -> skip }
  od
}
#else
active proctype Monitor() {
  atomic { timeout -> assert(ALL_DEAD && ALL_BACK) }
}
#endif

init {
  byte k;
  atomic {
    do
    :: k < PROCESSES -> process_state[k] = RUNS; answer_slot[k] = NONE; k++
    :: else -> break
    od;
    NewPool(UNKNOWN); pool_there = false;
    k = 0;
    run Crumbd();
    do
    :: k < PROCESSES -> run Process(k); k++
    :: else -> break
    od;
    k = 0
  }
}
