#pragma once

// The whole C++ API of flash_dmattn. The usual order of calls:
//
//   select_key_intervals   scores -> key intervals         (or intervals made by hand)
//   build_plan             key intervals -> plan           (once; forward and backward share it)
//   forward, backward
#include "flash_dmattn/attention.h"
#include "flash_dmattn/error.h"
#include "flash_dmattn/execution.h"
#include "flash_dmattn/selection.h"
#include "flash_dmattn/types.h"
