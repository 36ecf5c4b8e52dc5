#pragma once

// The whole C++ API of flash_dmattn. The usual order of calls:
//
//   project_scores         features of tokens -> scores
//   select_key_intervals   scores -> key intervals             (or intervals made by hand)
//   forward, backward
//
// Generation keeps the keys that later queries can see in a KV cache (kv_cache.h).
#include "flash_dmattn/attention.h"
#include "flash_dmattn/calls.h"
#include "flash_dmattn/error.h"
#include "flash_dmattn/execution.h"
#include "flash_dmattn/kv_cache.h"
#include "flash_dmattn/plan.h"
#include "flash_dmattn/problem.h"
#include "flash_dmattn/scores.h"
#include "flash_dmattn/selection.h"
#include "flash_dmattn/tile_lists.h"
#include "flash_dmattn/types.h"
#include "flash_dmattn/visibility.h"
