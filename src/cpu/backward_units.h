#pragma once

#include <cstdint>

#include "cpu/task.h"

// How the backward is divided into units (cpu/task.h).
namespace flash_dmattn::cpu {

// Sets what depends on the division: segments, and where dbias is shared, slabs and parts. The task has everything else but
// its memory. The division does not depend on the number of workers, so results do not either.
void divide_into_units(BackwardTask& task);

inline std::int64_t units_of(const BackwardTask& task) {
  return task.segments * task.batch * task.heads_kv;
}

// The number of keys that some query of the unit may see: the unit's slots.
std::int64_t count_slots(const BackwardTask& task, std::int64_t unit);

// Writes these keys to slot_keys, in ascending order. Only with intervals.
void list_keys(const BackwardTask& task, std::int64_t unit, std::int32_t* slot_keys);

}  // namespace flash_dmattn::cpu
