#pragma once

#include "cuda/sm90/forward/producer.cuh"
#include "cuda/sm90/prepare_key_info.cuh"

namespace flash_dmattn::cuda::sm90 {

// Computes the key info of the key tiles that a block visits, where it is read. TMA tiles are loaded by one thread, so
// three warps of the producer are free. Blocks of other query tiles compute the same info again, and no load is ahead
// of the tile that it is for; so this is for calls with one work tile per block and few keys, which then need neither
// the launch of PrepareForward nor a workspace.
template <class Kernel>
struct KeyInfoWarps : ProducerBase<Kernel> {
  using Base = ProducerBase<Kernel>;
  using Base::keys, Base::p, Base::storage;
  static constexpr int first_thread = warp_size;
  static constexpr int warps = 3;

  __device__ void run() const {
    const ForwardParams& params = p.forward;
    const WorkTile work = this->get_work(static_cast<int>(blockIdx.x));
    const QueryHead head{work.batch, work.head, work.kv_head};
    const auto& pipeline = storage.k_pipeline;
    for (int visit = 0; visit < work.visits; ++visit) {
      pipeline.wait_empty(visit);
      const int stage = Base::Storage::info_stage(visit);
      const int first_key = work.template first_key<keys>(visit);
      for (int i = static_cast<int>(threadIdx.x) - first_thread; i < keys; i += warps * warp_size) {
        const int key = first_key + i;
        storage.info.bias[stage][i] = key_bias<typename Kernel::Element>(
            params.shape, params.score, head, key, Kernel::key_bias_factor(p));
        if (work.is_partial(visit)) {
          storage.info.range[stage][i] =
              key_range(params.shape, params.score, work.batch, work.kv_head, key);
        }
      }
      pipeline.arrive_full(visit);
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
