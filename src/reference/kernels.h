#pragma once

#include "backend.h"

namespace flash_dmattn::reference {

extern const KvBackend kv_backend;

}  // namespace flash_dmattn::reference
